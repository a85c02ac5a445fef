"""Tells the hardware that a program runs on."""

from .utils import get_platform_target

__all__ = ["get_platform_target"]
