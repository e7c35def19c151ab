"""From a description of work to code that runs it. Renderers import their compilers lazily."""
