"""Translations of what clients constrain answers with into what llguidance reads, for frontends and engines."""
