"""An operator's additions to a model's folder: an adapter, a chat template, trust in its code. Owns their checks and
the loading of the adapter; engine thread. Only `apply_adapter` imports MLX."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from stoker_shared.errors import ModelNotLoadable
from stoker_shared.text import one_line

ADAPTER_WEIGHTS: Final = "adapters.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
_CODE_NEEDED: Final = "give --trust-remote-code if you trust its authors with this machine"


@dataclass(frozen=True)
class ModelExtras:
    """An operator's additions to a model.

    Attributes:
        adapter: folder of a LoRA or DoRA adapter as mlx-lm writes it.
        chat_template: file with a Jinja template, instead of the model's own.
        trust_remote_code: whether Python code in the model's folder may run.
    """

    adapter: Path | None = None
    chat_template: Path | None = None
    trust_remote_code: bool = False

    def check(self) -> None:
        """Look for the files, before anything slow. Raises `ModelNotLoadable` if one is missing or cannot be read."""
        _ = self.adapter_folder, self.template_text

    @cached_property
    def adapter_folder(self) -> Path | None:
        """Raises `ModelNotLoadable` if it is not the folder of an mlx-lm adapter."""
        if self.adapter is None:
            return None
        folder = self.adapter.expanduser()
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / name).is_file():
                raise ModelNotLoadable(f"--adapter {self.adapter} is not an adapter of mlx-lm: it has no {name}")
        return folder.resolve()

    @cached_property
    def template_text(self) -> str | None:
        """Raises `ModelNotLoadable` if the file cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelNotLoadable(f"cannot read --chat-template {self.chat_template}: {reason}") from None

    @property
    def tokenizer_options(self) -> dict[str, Any]:
        """For mlx-lm's ``load_tokenizer``; without `trust_remote_code`, transformers would ask on the terminal."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.template_text is not None:
            # A template that mlx-lm has as Python code for the model would be used instead of the file.
            options |= {"chat_template": self.template_text, "chat_template_type": None}
        return options

    def require_trust(self, folder: Path) -> None:
        """Raises `ModelNotLoadable` if the model is Python code in its folder that is not trusted."""
        try:
            code = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_file")
        except (OSError, ValueError, AttributeError):
            return  # mlx-lm reports a damaged config
        if code is not None and not self.trust_remote_code:
            raise ModelNotLoadable(f"this model runs code of its own, {code!r} in its folder: {_CODE_NEEDED}")

    def check_template(self, tokenizer: Any) -> None:
        """Compile the template in the `transformers` tokenizer that has it, as for a job. Raises `ModelNotLoadable` if
        it is not a Jinja template."""
        if self.template_text is None:
            return
        from jinja2 import TemplateSyntaxError

        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelNotLoadable(
                f"--chat-template {self.chat_template} does not compile: line {error.lineno}: {one_line(error)}"
            ) from None
        except Exception:  # a template may refuse this conversation, and yet be good for others
            return

    def apply_adapter(self, network: Any) -> None:
        """Put the adapter's weights beside the model's. They stay apart, as in mlx-lm: stoker answers as mlx-lm does,
        and a quantised model keeps its own weights exactly. Raises `ModelNotLoadable` if the adapter does not fit this
        model."""
        folder = self.adapter_folder
        if folder is None:
            return
        from mlx_lm.tuner.utils import load_adapters

        try:
            load_adapters(network, str(folder))
        except Exception as error:  # from KeyError in its config to ValueError for shapes
            raise ModelNotLoadable(f"--adapter {self.adapter} does not fit this model: {one_line(error)}") from None
        network.eval()  # the new layers would apply dropout, as in training


def not_loadable(model: str, error: Exception, extras: ModelExtras) -> ModelNotLoadable:
    """An error of mlx-lm or transformers in one line, which names the option if the model's code is not trusted."""
    if isinstance(error, ModelNotLoadable):
        return error
    needs_trust = not extras.trust_remote_code and "trust_remote_code" in str(error)
    reason = f"it runs code of its own: {_CODE_NEEDED}" if needs_trust else one_line(error)
    return ModelNotLoadable(f"cannot load {model}: {reason}")


NO_EXTRAS: Final = ModelExtras()
