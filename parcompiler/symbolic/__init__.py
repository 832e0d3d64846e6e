"""The costs of blocks and stages as expressions in the sizes of the captured model.

This file imports nothing: users of `sizes.py`, for captures at other sizes, need no report.
"""
