"""An optimised module: its plans for every size, as a module that is called, copied and saved.

Read in this order: vary, plans, follow, optimized, structure, saved.
"""

from deuteron.model.optimized import Optimized
from deuteron.model.saved import load

__all__ = ["Optimized", "load"]
