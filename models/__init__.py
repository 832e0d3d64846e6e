"""Plain torch models: gpt, llama, bert, t5, resnet, moe, dlrm. They know nothing of the compiler.

Each folder has `Config` (a frozen dataclass of sizes), the module, and `PRESETS` (published sizes
by name, and a `"tiny"` one). A model returns the mean cross-entropy when it is given labels, and
the logits when it is not; moe adds to it, in training, what uneven use of its experts costs.
"""
