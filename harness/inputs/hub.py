"""Models of the Hugging Face hub, downloaded once by its own client into its own cache."""

import re
import sys
from pathlib import Path

from harness import console
from harness.errors import UserError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # of the repository's root


def is_model_id(path: Path) -> bool:
    """Whether a path that does not exist reads as OWNER/NAME, and OWNER is no folder here."""
    return (
        not path.exists()
        and _ID.fullmatch(str(path)) is not None
        and path.suffix != ".gguf"
        and not path.parent.exists()
    )


def download(model_id: str) -> Path:
    """The folder of a model's files; cached files are not downloaded again.

    Raises:
        UserError: the model does not exist or is gated, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    console.say(f"Looking for {model_id} in the Hugging Face hub")
    elsewhere = "name a folder or a .gguf file, or download the model elsewhere"
    try:
        return Path(
            snapshot_download(model_id, allow_patterns=list(_FILES), ignore_patterns=["*/*"])
        )
    except GatedRepoError as error:
        told = "its owner asks for your consent; give it there and run `huggingface-cli login`"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        told, cause = f"there is no such model, or you may not see it; {elsewhere}", error
    except LocalEntryNotFoundError as error:
        told, cause = f"the hub cannot be reached from here; {elsewhere}", error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:120]
        told, cause = f"{type(error).__name__}: {reason}; {elsewhere}", error
    raise UserError(
        f"{model_id} cannot be downloaded from the Hugging Face hub: {told}."
    ) from cause
