"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halogen_core.errors import RequestError
from halogen_core.loader.chat_template import chat_template
from halogen_core.server import validation
from halogen_core.server.info_routes import json_response
from halogen_core.server.openai_models import DetokenizeBody, TokenizeBody
from halogen_core.server.prompts import refuse_huge_text
from halogen_core.server.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """Token ids of a text or of rendered messages."""
    body = validation.decode(TokenizeBody, await request.body())
    service.check_model(body.model)
    ids = await asyncio.to_thread(_ids, service, body)
    pieces = [service.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": service.engine.info.context_length,
    }
    if body.with_pieces:
        answer["tokens"] = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
    if body.return_token_strs:
        answer["token_strs"] = pieces
    return json_response(answer)


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        template = chat_template(service.tokenizer)
        messages = validation.template_messages(body.messages, template)
        return service.render(
            messages, add_generation_prompt=body.add_generation_prompt is not False
        )
    text = body.prompt if body.prompt is not None else body.content
    if text is None:
        raise RequestError("`prompt` or `messages` must be given", param="prompt")
    refuse_huge_text(service, text, "prompt")
    special = body.add_special_tokens if body.add_special is None else body.add_special
    if special is False:
        return service.tokenizer.encode(text, special=True)
    return service.tokenizer.encode_prompt(text)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids, control tokens shown."""
    body = validation.decode(DetokenizeBody, await request.body())
    service.check_model(body.model)
    validation.check_tokens(body.tokens, service.tokenizer.vocab_size, "tokens")
    text = service.tokenizer.decode(body.tokens, control=True)
    return json_response({"prompt": text, "content": text})


async def tokenizer_info(service: Service) -> Response:
    """What lm-eval's remote tokenizer asks for."""
    tokenizer = service.tokenizer
    ends = sorted(tokenizer.end_token_ids)
    texts = [tokenizer.decode([i], control=True) for i in ends]
    bos = tokenizer.bos_token_id
    return json_response(
        {
            "eos_token": texts[0] if texts else None,
            "eos_token_ids": ends,
            "bos_token": None if bos is None else tokenizer.decode([bos], control=True),
            "pad_token": texts[0] if texts else None,
            "chat_template": tokenizer.chat_templates.get("default"),
            "vocab_size": tokenizer.vocab_size,
        }
    )
