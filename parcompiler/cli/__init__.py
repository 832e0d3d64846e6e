"""The command line: `parcompiler plan`, `compile`, `verify`, `diff`, `report`, `calibrate`...

app.py ── commands.py ── request.py ── model.py ── huggingface.py     MODEL -> (model, inputs)
   │                         └──────── options.py ── words.py         options, checked
   └───── output.py      files, standard output, messages, exit codes

Modules of the planning half are imported inside the commands: torch takes seconds to load, and
`--help` and completion do not need it.
"""

from parcompiler.cli.app import main, run

__all__ = ["main", "run"]
