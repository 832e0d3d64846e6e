"""Layers of emitted stages through torch.compile's compiler: once per template, static shapes.

tracing     the extra inputs of a layer
exchange    collectives inside of a compiled layer
layers      the templates of a rank's stages, and the layers that call them
build       compiles templates, each once for all processes that run here and later
"""
