"""What every route needs, made once at start."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import attrs

from halogen_core.config import Config
from halogen_core.engine.client import EngineClient
from halogen_core.engine.grammar_trials import GrammarTrials
from halogen_core.errors import EngineUnavailable, RequestError
from halogen_core.loader import Tokenizer
from halogen_core.server.admission import Admission
from halogen_core.server.metrics import Metrics

Render = Callable[..., list[int]]
"""`render_chat` of the model's tokenizer."""


@attrs.define(kw_only=True)
class Service:
    """One model behind one engine, and the server's own state."""

    config: Config
    tokenizer: Tokenizer
    render: Render
    trials: GrammarTrials
    admission: Admission
    metrics: Metrics
    created: int = attrs.field(factory=lambda: int(time.time()))
    draining: bool = False
    loaded: float = 0.0
    """Share of the weights that is on the device, 0 to 1."""
    _engine: EngineClient | None = None

    @property
    def engine(self) -> EngineClient:
        """The engine; raises `EngineUnavailable` while it loads for the first time."""
        if self._engine is None:
            raise EngineUnavailable(f"the engine is loading: {self.loaded:.0%}")
        return self._engine

    def engine_started(self, engine: EngineClient) -> None:
        """From now on requests are served."""
        self._engine = engine

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first is the one that answers carry."""
        return tuple(
            dict.fromkeys((*self.config.model.served_model_name, self.engine.info.model_id))
        )

    @property
    def fingerprint(self) -> str:
        """Model version and backend: the same fingerprint and seed give the same answer."""
        info = self.engine.info
        return f"fp_{info.content_id[:12]}_{info.backend}"

    def check_model(self, name: str | None) -> str:
        """The name to answer with; no name means the model that is here."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(f"`{n}`" for n in self.model_names)
            raise RequestError(
                f"model `{name[:128]}` is not served here; served: {known}",
                param="model",
                code="HRT-4007",
            )
        return name

    def refuse_if_draining(self) -> None:
        """Raise while the server is shutting down."""
        if self.draining:
            raise EngineUnavailable("the server is shutting down", fix="retry elsewhere")


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"
