"""The version: of the package, of its commands and of its distribution, which reads it here."""

__version__ = "0.2.0"
