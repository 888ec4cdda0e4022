"""Models that think before they answer, over HTTP."""

import openai
import pytest

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}<|im_end|>{% endfor %}"
    "{% if open %}<think>\n{% endif %}{# <think> #}"
)
HI = [{"role": "user", "content": "Hi"}]
ANSWER = "<think>\nStop here? No.\n</think>\n\nYes. Stop here."


@pytest.fixture(scope="module")
def ask(serve):
    """ask(text that the model writes, **fields) -> (thoughts, answer, finish reason)."""
    written = [""]

    with serve(lambda _request: list(written[0].encode()), template=TEMPLATE) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

        def ask(text, **fields):
            written[0] = text
            fields = {"model": "scripted", "messages": HI, "extra_body": {}} | fields
            whole = client.chat.completions.create(**fields).choices[0]
            thoughts = content = ""
            for chunk in client.chat.completions.create(stream=True, **fields):
                delta = chunk.choices[0].delta
                thoughts += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
            message = whole.message
            assert (thoughts, content) == (
                getattr(message, "reasoning_content", ""),
                message.content,
            )
            return thoughts, content, whole.finish_reason

        ask.engine = server.engine
        yield ask
        client.close()


def test_thoughts_come_beside_the_answer(ask):
    assert ask(ANSWER) == ("Stop here? No.", "Yes. Stop here.", "stop")


def test_stop_strings_end_answers_not_thoughts(ask):
    """vllm#14399"""
    assert ask(ANSWER, stop=["Stop"]) == ("Stop here? No.", "Yes. ", "stop")


def test_there_is_always_content(ask):
    """lemonade#1370"""
    assert ask(ANSWER, max_tokens=12) == ("Stop", "", "length")


def test_the_prompt_may_open_the_tag(ask):
    extra = {"chat_template_kwargs": {"open": True}}
    assert ask("a</think>b", extra_body=extra) == ("a", "b", "stop")


def test_an_answer_without_thoughts(ask):
    assert ask("Just this.") == ("", "Just this.", "stop")


def test_parting_can_be_left_to_the_client(ask):
    extra = {"reasoning_format": "none"}
    assert ask(ANSWER, extra_body=extra) == ("", ANSWER, "stop")


def test_a_structured_answer_is_not_taken_for_thoughts(ask):
    extra = {"chat_template_kwargs": {"open": True}, "guided_choice": ["yes"]}
    assert ask("yes", extra_body=extra) == ("", "yes", "stop")
