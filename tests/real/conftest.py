"""The tiny models of the tests of the imitation."""

from tests.sdk.conftest import application, private_work_dir, tiny_llama

__all__ = ["application", "private_work_dir", "tiny_llama"]
