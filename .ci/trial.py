# ruff: noqa: INP001
"""What a wheel must do in the environment whose folder is given: compile, prove, export, train."""

import subprocess
import sys
from pathlib import Path

import torch

import parcompiler as pc
from parcompiler.models import gpt

environment = Path(sys.argv[1])
assert Path(pc.__file__).is_relative_to(environment), f"{pc.__file__} is not that of the wheel"
model = gpt.GPT(gpt.Config(layers=4, heads=2, hidden=16, vocabulary=64, sequence=8))
tokens = torch.zeros(2, 8, dtype=torch.long)
program = pc.compile(model, pc.Mesh(pipeline=2, tensor=2), (tokens, tokens), microbatches=4)
verification = program.verify()
assert verification.ok, str(verification)
assert verification.gradient_error < 1e-9, str(verification)
program.export("out")
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
subprocess.run([*torchrun, "out/main.py", "--steps", "2"], check=True)
program.report().to_html("report.html")
assert Path("report.html").stat().st_size > 1_000_000
command = [str(environment / "bin" / "parcompiler"), "--version"]
said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
print(f"torch {torch.__version__}: {said}, gradients {verification.gradient_error:.1e}")
