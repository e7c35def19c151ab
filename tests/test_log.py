"""Progress messages: what ``verbose`` prints, and that the program around it stays as it is."""

import logging

from deuteron.log import log, logged_to_console


def test_levels_come_back(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    assert not log.isEnabledFor(logging.INFO)
    with logged_to_console(True):
        log.info("a stage")
    assert "a stage" in capsys.readouterr().err
    assert log.propagate and not log.isEnabledFor(logging.INFO)
