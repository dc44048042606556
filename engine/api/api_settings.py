# SPDX-License-Identifier: Apache-2.0
"""`ApiSettings`: the settings of the HTTP server's routes, such as limits of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...tiers.settings.values import MIB, ConfigError
from ..request.sampling_params import MAX_N

# The routes that load and unload LoRA adapters, which exist only with `lora_dir`.
LORA_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True, slots=True)
class CrossOrigin:
    """The rules (CORS) for web pages of other origins. `*` stands for any value."""

    origins: tuple[str, ...]
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False  # True: pages may send cookies and other credentials of a browser


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the routes. Raises ConfigError for invalid values."""

    api_key: str | None = field(default=None, repr=False)  # None: requests need no key
    metrics_without_key: bool = False
    tenant_header: str | None = None  # the header that names the tenant; None: all are one tenant
    cross_origin: CrossOrigin | None = None  # None: no web page of another origin is allowed
    media_domains: tuple[str, ...] = ()  # hosts from which pictures are fetched
    allowed_hosts: frozenset[str] | None = None  # allowed values of the header Host; None: any
    max_body_bytes: int = 16 * MIB
    max_prompts_per_request: int = 128
    max_messages_per_request: int = 4096
    # The time from the end of a request's body after which the request is aborted.
    request_timeout_seconds: float = 3600.0
    # The time limit for a client to send a request's body.
    body_timeout_seconds: float = 60.0
    # The time limit for each part of a prompt in parts, except the first part.
    part_timeout_seconds: float = 60.0
    # Limits of one rendering of the chat template: processor time, and characters of the result.
    template_timeout_seconds: float = 2.0
    max_rendered_characters: int = 4 * MIB
    # Limit of a request's texts, because the tokenizer takes about 200 bytes for each character.
    max_text_characters: int = 2 * MIB
    # The time limit of a scrape for new metrics of the engine core; a late core's last values stay.
    stats_timeout_seconds: float = 1.0
    enable_dev_routes: bool = False
    # The folder that has the LoRA adapters which clients may load; None: clients may load none.
    lora_dir: Path | None = None
    # Limits of answers in one request: for one prompt, and for all prompts of the request together.
    max_n: int = MAX_N
    max_choices_per_request: int = 256
    # Limit of prompt log-probabilities in one answer, summed over positions and likely tokens.
    max_prompt_logprobs_per_request: int = 1_000_000
    # Limit of log-probabilities of new tokens, counted as if every answer had `max_tokens` tokens.
    max_logprobs_per_request: int = 1_000_000
    max_template_kwargs_bytes: int = 64 * 1024
    max_tools_per_request: int = 128
    max_pictures_per_request: int = 16
    max_tools_bytes: int = 256 * 1024  # limit of the JSON of all tools of a request

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty; give a key, or leave the option out")
        for name in (
            "max_body_bytes", "max_prompts_per_request", "max_messages_per_request",
            "request_timeout_seconds", "body_timeout_seconds", "part_timeout_seconds",
            "template_timeout_seconds",
            "max_rendered_characters", "max_text_characters", "stats_timeout_seconds", "max_n",
            "max_choices_per_request", "max_prompt_logprobs_per_request",
            "max_logprobs_per_request", "max_template_kwargs_bytes",
            "max_tools_per_request", "max_tools_bytes", "max_pictures_per_request",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
