"""What blocks and stages cost as expressions in the sizes of the captured model.

This file imports nothing: what captures at other sizes (`sizes.py`) needs no report.
"""
