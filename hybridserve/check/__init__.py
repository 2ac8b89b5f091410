"""Telling, before a model is loaded, whether it will run: what `hybridserve check-model` does, without its printing."""
