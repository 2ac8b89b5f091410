"""The conformance kit: what every mixer must hold, whatever its mathematics, checked through `forward` alone.

Owns the checks, the default cases of the built-in kinds, and the verdict. Must not know the scheduler, models or HTTP. Called by
`hybridserve check-layer`, by the pytest plug-in beside it, and by the tests of mixers.
"""
