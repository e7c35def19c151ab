"""The model zoo: published sizes and names, and the properties each architecture promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tolerances import NETWORK, error
from torch import Tensor, nn

from deuteron import zoo
from deuteron.zoo import bert, deeplab, llama, mobilenet, randomise_, resnet, unet
from tests.sweeps import sweep_unless

SMALL_BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
SMALL_LLAMA = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The model without memory for its weights: enough for names and counts."""
    with torch.device("meta"):
        return make()


def tokens(*shape: int) -> Tensor:
    return torch.randint(100, shape, generator=torch.Generator().manual_seed(1))


# --- sizes and names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (resnet.resnet18, 11_689_512),
        (resnet.resnet50, 25_557_032),
        (mobilenet.mobilenet_v2, 3_504_872),
        (mobilenet.mobilenet_v3_large, 5_483_032),
        (lambda: deeplab.deeplabv3_resnet50(aux=True), 42_004_074),
        (deeplab.deeplabv3_resnet50, 39_638_869),
        (unet.UNet, 31_037_698),
        (lambda: bert.BertModel(bert.BertConfig()), 109_482_240),
    ],
)
def test_parameter_count_is_the_published_one(make, count):
    assert sum(p.numel() for p in meta(make).parameters()) == count


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "resnet50",
            {
                "conv1.weight": (64, 3, 7, 7),
                "bn1.running_var": (64,),
                "layer1.0.downsample.0.weight": (256, 64, 1, 1),
                "layer1.0.downsample.1.num_batches_tracked": (),
                "layer4.2.conv3.weight": (2048, 512, 1, 1),
                "fc.bias": (1000,),
            },
        ),
        (
            "deeplabv3_resnet50",
            {
                "backbone.layer4.0.conv2.weight": (512, 512, 3, 3),
                "classifier.0.convs.0.0.weight": (256, 2048, 1, 1),
                "classifier.0.convs.3.1.running_mean": (256,),
                "classifier.0.convs.4.1.weight": (256, 2048, 1, 1),
                "classifier.0.convs.4.2.bias": (256,),
                "classifier.0.project.0.weight": (256, 1280, 1, 1),
                "classifier.1.weight": (256, 256, 3, 3),
                "classifier.2.weight": (256,),
                "classifier.4.bias": (21,),
            },
        ),
        (
            "mobilenet_v2",
            {
                "features.0.0.weight": (32, 3, 3, 3),
                "features.1.conv.1.weight": (16, 32, 1, 1),
                "features.2.conv.0.0.weight": (96, 16, 1, 1),
                "features.2.conv.3.running_mean": (24,),
                "features.18.1.bias": (1280,),
                "classifier.1.weight": (1000, 1280),
            },
        ),
        (
            "mobilenet_v3_large",
            {
                "features.0.0.weight": (16, 3, 3, 3),
                "features.1.block.0.0.weight": (16, 1, 3, 3),
                "features.4.block.2.fc1.weight": (24, 72, 1, 1),
                "features.4.block.3.1.weight": (40,),
                "features.16.0.weight": (960, 160, 1, 1),
                "classifier.0.weight": (1280, 960),
                "classifier.3.bias": (1000,),
            },
        ),
        (
            "unet",
            {
                "inc.double_conv.0.weight": (64, 3, 3, 3),
                "down1.maxpool_conv.1.double_conv.4.weight": (128,),
                "up1.up.weight": (1024, 512, 2, 2),
                "up1.conv.double_conv.3.weight": (512, 512, 3, 3),
                "outc.conv.bias": (2,),
            },
        ),
        (
            "bert",
            {
                "embeddings.word_embeddings.weight": (30522, 768),
                "embeddings.LayerNorm.bias": (768,),
                "encoder.layer.0.attention.self.query.weight": (768, 768),
                "encoder.layer.0.attention.output.LayerNorm.weight": (768,),
                "encoder.layer.11.intermediate.dense.weight": (3072, 768),
                "encoder.layer.11.output.dense.bias": (768,),
                "pooler.dense.weight": (768, 768),
            },
        ),
        (
            "llama_tiny",
            {
                "model.embed_tokens.weight": (4096, 512),
                "model.layers.0.self_attn.q_proj.weight": (512, 512),
                "model.layers.0.self_attn.k_proj.weight": (128, 512),
                "model.layers.3.mlp.gate_proj.weight": (1408, 512),
                "model.layers.3.input_layernorm.weight": (512,),
                "model.layers.3.post_attention_layernorm.weight": (512,),
                "model.norm.weight": (512,),
                "lm_head.weight": (4096, 512),
            },
        ),
    ],
)
def test_state_dict_has_the_public_names(name, keys):
    state = meta(zoo.MODELS[name].build).state_dict()
    assert {key: tuple(state[key].shape) for key in keys if key in state} == keys


def test_state_dict_holds_no_rotary_tables():
    state = meta(zoo.MODELS["llama_tiny"].build).state_dict()
    assert not [key for key in state if "rotary" in key]
    assert len(state) == 3 + 4 * 9


# --- vision ---------------------------------------------------------------------------------


def test_resnet_takes_any_size():
    assert zoo.build("resnet18", num_classes=7)(torch.randn(2, 3, 65, 47)).shape == (2, 7)


@pytest.mark.parametrize(
    ("dilate", "size"),
    [((False, False, False), 2), ((False, False, True), 4), ((False, True, True), 8)],
)
def test_dilation_replaces_stride(dilate, size):
    net = resnet.ResNetBackbone(resnet.Bottleneck, (1, 1, 1, 1), dilate).eval()
    assert net(torch.randn(1, 3, 64, 64)).shape == (1, 2048, size, size)


def test_dilated_backbone_has_the_published_dilations():
    net = meta(deeplab.deeplabv3_resnet50)
    assert isinstance(net, deeplab.DeepLabV3)
    convs = {k: m for k, m in net.backbone.named_modules() if isinstance(m, nn.Conv2d)}
    assert convs["layer3.0.conv2"].dilation == (1, 1)
    assert convs["layer3.1.conv2"].dilation == (2, 2)
    assert convs["layer4.0.conv2"].dilation == (2, 2)
    assert convs["layer4.1.conv2"].dilation == convs["layer4.1.conv2"].padding == (4, 4)
    assert all(convs[f"layer{n}.0.conv2"].stride == (1, 1) for n in (1, 3, 4))


def test_resnet_refuses_wrong_number_of_flags():
    with pytest.raises(ValueError, match="stages 2, 3 and 4"):
        resnet.resnet18(replace_stride_with_dilation=(True,))


def test_deeplab_returns_logits_at_input_size():
    x = torch.randn(1, 3, 49, 65)
    out = zoo.build("deeplabv3_resnet50", num_classes=5, aux=True)(x)
    assert {head: tuple(t.shape) for head, t in out.items()} == {
        "out": (1, 5, 49, 65),
        "aux": (1, 5, 49, 65),
    }
    assert list(meta(deeplab.deeplabv3_resnet50).eval()(x.to("meta"))) == ["out"]


@pytest.mark.parametrize("make", [mobilenet.mobilenet_v2, mobilenet.mobilenet_v3_large])
def test_mobilenet_takes_any_size(make):
    out = randomise_(make(num_classes=9)).eval()(torch.randn(2, 3, 65, 47))
    assert out.shape == (2, 9)
    assert 0.05 < out.std() < 10


def test_squeeze_excitation_gates_whole_channels():
    gate = randomise_(mobilenet.SqueezeExcitation(8, 8))
    x = torch.rand(2, 8, 5, 5) + 0.1
    ratio = gate(x) / x
    torch.testing.assert_close(ratio, ratio[:, :, :1, :1].expand_as(ratio))
    assert ratio.min() >= 0
    assert ratio.max() <= 1
    assert ratio.std() > 0


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("size", [(32, 48), (37, 51), (16, 31)])
def test_unet_keeps_the_input_size(bilinear, size):
    net = zoo.build("unet", width=4, num_classes=3, bilinear=bilinear)
    assert net(torch.randn(2, 3, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize(
    ("name", "sizes"), [("resnet18", {}), ("mobilenet_v3_large", {}), ("unet", {"width": 4})]
)
def test_channels_last_gives_the_same_result(name, sizes):
    net = zoo.build(name, **sizes)
    x = torch.randn(1, 3, 33, 33)
    expected = net(x)
    got = net.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert error(got, expected) <= NETWORK


# --- language -------------------------------------------------------------------------------


def test_bert_shapes_and_defaults():
    net = zoo.build("bert_4l", **SMALL_BERT)
    ids = tokens(2, 7)
    hidden, pooled = net(ids)
    assert hidden.shape == (2, 7, 32)
    assert pooled.shape == (2, 32)
    assert pooled.abs().max() <= 1
    ones = torch.ones_like(ids)
    torch.testing.assert_close(net(ids, ones, torch.zeros_like(ids))[0], hidden)
    assert (net(ids, None, ones)[0] - hidden).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_bert_mask_hides_padding(dtype):
    net = zoo.build("bert_4l", **SMALL_BERT)
    ids, other = tokens(1, 8), tokens(1, 8)
    other[:, 5:] = (other[:, 5:] + 1) % 100
    mask = (torch.arange(8) < 5)[None].to(dtype)
    hidden, pooled = net(ids, mask)
    hidden_other, pooled_other = net(other, mask)
    torch.testing.assert_close(hidden[:, :5], hidden_other[:, :5])
    torch.testing.assert_close(pooled, pooled_other)
    assert error(hidden[:, :5], net(ids[:, :5])[0]) <= NETWORK
    assert (net(ids)[0][:, :5] - net(other)[0][:, :5]).abs().max() > 1e-3


def test_bert_layer_matches_the_library_one():
    """torch.nn.TransformerEncoderLayer is the same post-norm layer under other names."""
    config = bert.BertConfig(**SMALL_BERT)
    ours = randomise_(bert.BertLayer(config)).eval()
    theirs = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
    theirs = theirs.eval()
    for norm in (theirs.norm1, theirs.norm2):
        norm.eps = config.layer_norm_eps
    s = ours.state_dict()
    qkv = [f"attention.self.{part}" for part in ("query", "key", "value")]
    state = {
        "self_attn.in_proj_weight": torch.cat([s[f"{part}.weight"] for part in qkv]),
        "self_attn.in_proj_bias": torch.cat([s[f"{part}.bias"] for part in qkv]),
    }
    renamed = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for there, here in renamed.items():
        state |= {f"{there}.{part}": s[f"{here}.{part}"] for part in ("weight", "bias")}
    theirs.load_state_dict(state)
    x = torch.randn(2, 7, 32)
    assert error(ours(x, None), theirs(x)) <= NETWORK


def test_bert_reads_published_variants():
    net = zoo.build("bert_4l", **SMALL_BERT)
    published = {"cls.predictions.bias": torch.zeros(3)}
    for key, value in net.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
        published["bert." + key.replace("LayerNorm.bias", "LayerNorm.beta")] = value
    published["bert.embeddings.position_ids"] = torch.arange(32)
    other = zoo.build("bert_4l", seed=1, **SMALL_BERT)
    other.load_state_dict(bert.convert_state_dict(published))
    ids = tokens(1, 6)
    assert torch.equal(other(ids)[0], net(ids)[0])


def test_llama_is_causal():
    net = zoo.build("llama_tiny", **SMALL_LLAMA)
    ids = tokens(2, 12)
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 100
    before, after = net(ids), net(changed)
    assert before.shape == (2, 12, 100)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax(dim=(0, 2)).min() > 1e-3


def test_rotary_pairs_halves_and_turns_by_position():
    config = llama.LlamaConfig(**SMALL_LLAMA)
    cos, sin = llama.RotaryEmbedding(config)(20, torch.float64)
    assert cos.shape == sin.shape == (20, config.head_dim)
    x = torch.zeros(20, config.head_dim, dtype=torch.float64)
    x[:, 1] = 1
    angle = torch.arange(20) * config.rope_theta ** (-2 / config.head_dim)
    rotated = llama.apply_rotary(x, cos, sin)
    torch.testing.assert_close(rotated[:, 1], angle.cos(), check_dtype=False)
    torch.testing.assert_close(rotated[:, 1 + config.head_dim // 2], angle.sin(), check_dtype=False)


def test_rotary_scores_depend_on_distance_only():
    config = llama.LlamaConfig(**SMALL_LLAMA)
    cos, sin = llama.RotaryEmbedding(config)(40, torch.float64)
    q, k = torch.randn(2, config.head_dim, dtype=torch.float64)
    query = llama.apply_rotary(q.expand(40, -1), cos, sin)
    key = llama.apply_rotary(k.expand(40, -1), cos, sin)
    scores = query @ key.T
    for distance in (0, 1, 7, -5):
        diagonal = scores.diagonal(distance)
        assert error(diagonal, diagonal[:1].expand_as(diagonal)) <= NETWORK
    assert scores[0].std() > 0.1


def test_rotary_frequencies_survive_casts():
    net = zoo.build("llama_tiny", **SMALL_LLAMA)
    assert isinstance(net, llama.LlamaForCausalLM)
    before = net.model.rotary_emb.inv_freq.clone()
    net.half()
    assert net.lm_head.weight.dtype == torch.float16
    assert torch.equal(net.model.rotary_emb.inv_freq, before)
    assert net(tokens(1, 6)).dtype == torch.float16


def test_rope_scaling_slows_only_slow_frequencies():
    sizes = {**SMALL_LLAMA, "rope_theta": 500000.0}
    plain = llama.rotary_frequencies(llama.LlamaConfig(**sizes))
    scaled = llama.rotary_frequencies(llama.LlamaConfig(**sizes, rope_scaling=llama.RopeScaling()))
    ratio = plain / scaled
    assert ratio[0] == 1
    torch.testing.assert_close(ratio[-1], torch.tensor(32.0))
    assert torch.all(ratio[1:] >= ratio[:-1])


def test_grouped_query_attention_shares_each_key_head_with_neighbours():
    """Repeating each key/value head in place gives an ungrouped model with the same logits."""
    grouped = zoo.build("llama_tiny", **SMALL_LLAMA)
    full = zoo.build("llama_tiny", **{**SMALL_LLAMA, "num_key_value_heads": 4})
    state = grouped.state_dict()
    for key, value in state.items():
        if "k_proj" in key or "v_proj" in key:
            state[key] = value.unflatten(0, (2, 16)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    ids = tokens(1, 9)
    assert error(full(ids), grouped(ids)) <= NETWORK


def test_llama_ties_and_reads_tied_files():
    tied = zoo.build("llama_tiny", tie_word_embeddings=True, **SMALL_LLAMA)
    assert isinstance(tied, llama.LlamaForCausalLM)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    published = dict(tied.state_dict())
    del published["lm_head.weight"]
    published["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    other = zoo.build("llama_tiny", seed=1, tie_word_embeddings=True, **SMALL_LLAMA)
    other.load_state_dict(llama.convert_state_dict(published))
    assert torch.equal(other(tokens(1, 5)), tied(tokens(1, 5)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bert.BertConfig(hidden_size=30), "hidden_size 30"),
        (lambda: llama.LlamaConfig(hidden_size=24), "hidden_size 24"),
        (lambda: llama.LlamaConfig(num_key_value_heads=3), "num_key_value_heads 3"),
    ],
)
def test_impossible_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the table ------------------------------------------------------------------------------


def test_build_is_reproducible_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = zoo.build("mobilenet_v2").state_dict()
    assert torch.equal(torch.rand(3), expected)
    second = zoo.build("mobilenet_v2").state_dict()
    third = zoo.build("mobilenet_v2", seed=1).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for key, value in first.items():
        if not key.endswith("num_batches_tracked"):
            assert not torch.equal(value, third[key]), key


def test_build_randomises_batch_norm_statistics():
    net = zoo.build("resnet18")
    assert not net.training
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean.std() > 0.1
            assert module.running_var.std() > 0.1
            assert module.running_var.min() > 0.5


def test_randomise_refuses_layers_it_does_not_know():
    with pytest.raises(TypeError, match="PReLU"):
        randomise_(nn.Sequential(nn.PReLU()))


QUICK = {"resnet18", "mobilenet_v3_large", "unet", "bert_4l", "llama_tiny"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=sweep_unless(name in QUICK))
        for name, sizes in (
            ("resnet18", {}),
            ("resnet50", {}),
            ("deeplabv3_resnet50", {}),
            ("mobilenet_v2", {}),
            ("mobilenet_v3_large", {}),
            ("unet", {}),
            ("bert_4l", {"vocab_size": 30522, "hidden_size": 96, "intermediate_size": 384}),
            ("llama_tiny", {}),
        )
    ],
)
def test_activations_keep_their_size(name, sizes):
    inputs = zoo.example(name, batch=2)
    if inputs[0].is_floating_point():
        inputs = (inputs[0][:, :, ::4, ::4],)
    out = zoo.build(name, seed=3, **sizes)(*inputs)
    if isinstance(out, dict):
        out = out["out"]
    elif isinstance(out, tuple):
        out = out[0]
    assert 0.1 < out.std() < 10
    # The input must matter too, or no test on a random model would notice a lost layer.
    assert (out[0] - out[1]).std() > 0.02 * out.std()


def test_examples():
    assert [t.shape for t in zoo.example("resnet50", batch=3)] == [(3, 3, 224, 224)]
    assert [t.shape for t in zoo.example("deeplabv3_resnet50")] == [(1, 3, 512, 512)]
    (image,) = zoo.example("mobilenet_v2", dtype=torch.float16)
    assert image.dtype == torch.float16
    for name in ("bert", "bert_4l", "llama_tiny", "llama_1b"):
        (ids,) = zoo.example(name, batch=2, dtype=torch.float16)
        assert ids.shape == (2, 128)
        assert ids.dtype == torch.int64
    assert torch.equal(zoo.example("unet")[0], zoo.example("unet")[0])


def test_table_is_complete():
    assert zoo.names() == list(zoo.MODELS)
    assert {"resnet18", "resnet50", "deeplabv3_resnet50", "mobilenet_v2", "unet"} <= set(
        zoo.names()
    )
    assert {"mobilenet_v3_large", "bert", "bert_4l", "llama_tiny", "llama_1b"} <= set(zoo.names())
    for entry in zoo.MODELS.values():
        assert entry.description
        assert "\n" not in entry.description


@pytest.mark.parametrize("call", [zoo.build, zoo.example])
def test_unknown_name_lists_near_matches_and_all_names(call):
    with pytest.raises(ValueError, match="no model named 'resnet5'") as error:
        call("resnet5")
    assert "did you mean resnet50" in str(error.value)
    assert all(name in str(error.value) for name in zoo.names())
    with pytest.raises(ValueError, match="no model named '@@'") as error:
        call("@@")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("unet", {"width": 4}),
        ("bert_4l", SMALL_BERT),
        pytest.param("resnet18", {}, marks=pytest.mark.sweep),
        pytest.param("deeplabv3_resnet50", {"aux": True}, marks=pytest.mark.sweep),
        pytest.param("mobilenet_v2", {}, marks=pytest.mark.sweep),
        pytest.param("mobilenet_v3_large", {}, marks=pytest.mark.sweep),
        pytest.param("unet", {"width": 4, "bilinear": True}, marks=pytest.mark.sweep),
        pytest.param("llama_tiny", SMALL_LLAMA, marks=pytest.mark.sweep),
    ],
)
def test_models_export(name, sizes):
    net = zoo.build(name, **sizes)
    if name == "bert_4l":
        inputs = (tokens(1, 9), torch.ones(1, 9, dtype=torch.int64))
    elif name == "llama_tiny":
        inputs = (tokens(1, 9),)
    else:
        inputs = (torch.randn(1, 3, 33, 47),)
    program = torch.export.export(net, inputs, strict=False)
    got, expected = program.module()(*inputs), net(*inputs)
    torch.testing.assert_close(got, expected)
