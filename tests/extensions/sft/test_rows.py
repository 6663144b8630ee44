"""What is trained of a conversation: exactly what the assistant says, behind exactly what the template puts there."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.algo.samples import build_samples
from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.extensions.sft.rows import RENDERED, ChatRows, Trained, trajectory_of
from asyncrl.extensions.sft.training import Conversations
from asyncrl.models.tiny import write, write_tokenizer
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.schema import Group
from tests.fakes import compose_values, tiny_config

THINKING = (
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'assistant' and not loop.last and '/' in m.content %}{{ m.content.split('/')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
"""Removes what stands before a slash from earlier answers, as Qwen3's template removes thinking."""
CHAT = [
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "a/4"},
    {"role": "user", "content": "sure"},
    {"role": "assistant", "content": "b/yes"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_bytes(tmp_path_factory.mktemp("rows") / "model", THINKING, "<s>", "<e>")


def of_bytes(folder: Path, template: str, begin: str, end: str, *others: str) -> Path:
    """Write a model folder with a tokenizer of bytes and these special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([begin, end, *others])
    write_tokenizer(folder, tokenizer.to_str(), template, {"eos_token": end, "bos_token": begin}, 512)
    return folder


def trained(model: Path, template: str | None = None, tmp_path: Path | None = None) -> Trained:
    changes: dict[str, Any] = {}
    if template is not None:
        assert tmp_path
        (tmp_path / "template.jinja").write_text(template)
        changes = {"model.chat_template": str(tmp_path / "template.jinja")}
    return Trained(model, tiny_config(**changes))


def test_rows_beyond_the_context_of_the_run_are_refused(model: Path) -> None:
    """Where a family's positions are limited by engine.server_args.context_length, it is for trainers, too."""
    config = tiny_config(**{"engine.server_args": {"context_length": 16}})
    policy: Any = SimpleNamespace(folder=model, hf={"max_position_embeddings": 512})
    rows: Any = SimpleNamespace(
        named=lambda number: f"Row {number}", rendered=lambda number: None, conversation=lambda number: (CHAT, [])
    )
    with pytest.raises(ConfigError, match=r"Row 0 has \d+ tokens, but the model 16 positions"):
        Conversations(config, policy, rows).read(range(1))


def text(model: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model).decode(ids, skip_special_tokens=False))


def test_trained_tokens_spell_the_assistants_text(model: Path) -> None:
    first, second = trained(model).parts(CHAT, [], "Row 0")
    assert text(model, first.observation) == "<s>user:2+2<e><s>assistant:"
    assert text(model, first.written) == "a/4<e>"
    assert text(model, second.written) == "b/yes<e>"
    # the template changed the first answer: the context begins anew, and the answer is not trained in a context that
    # the model will never see
    assert second.begins
    assert text(model, second.observation) == "<s>user:2+2<e><s>assistant:4<e><s>user:sure<e><s>assistant:"


def test_turn_follows_the_last_where_the_template_keeps_it(model: Path) -> None:
    chat = [{**message, "content": message["content"].replace("/", "")} for message in CHAT]
    first, second = trained(model).parts(chat, [], "Row 0")
    assert (first.begins, second.begins) == (True, False)
    assert text(model, second.observation) == "<s>user:sure<e><s>assistant:"
    group = Group("g", 0, first.observation, [trajectory_of([first, second], 0)], "chat")
    (samples,) = build_samples([group])
    assert [text(model, [t for t, m in zip(one.token_ids, one.mask, strict=True) if m]) for one in samples] == [
        "a4<e>byes<e>"
    ]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1].strip() }}"
    "{% elif m.tool_calls %}{{ m.content }}\n<tool_call>\n{{ m.tool_calls[0].function | tojson }}\n</tool_call>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ begun }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
THOUGHTS = ["<think>\nadd\n</think>\n\nIt is 4.", "<think>\nhm\n</think>\n\nYes.\nI am."]
ANSWERS = ["It is 4.", "Yes.\nI am."]
FAMILIES: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    # template, tokens that end an answer, answers, what is trained of them
    "qwen3": (CHATML, ["<|im_end|>"], THOUGHTS, [f"{text}<|im_end|>" for text in THOUGHTS]),
    "qwen3 that always thinks": (
        CHATML.replace("{{ begun }}", "<think>\n"),
        ["<|im_end|>"],
        THOUGHTS,
        [f"{text.removeprefix('<think>')[1:]}<|im_end|>" for text in THOUGHTS],
    ),
    "llama3": (LLAMA, ["<|eot_id|>"], ANSWERS, [f"{text}<|eot_id|>" for text in ANSWERS]),
    "mistral": (MISTRAL, ["</s>"], ANSWERS, [f" {text}</s>" for text in ANSWERS]),
    "phi3": (PHI3, ["<|end|>", "<|endoftext|>"], ANSWERS, [f"{text}<|end|>" for text in ANSWERS]),
    "phi4": (PHI4, ["<|im_end|>"], ANSWERS, [f"{text}<|im_end|>" for text in ANSWERS]),
}
"""The templates of families, without what is of no concern here."""


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_every_family_are_trained_to_the_letter(tmp_path: Path, family: str) -> None:
    template, ends, answers, expected = FAMILIES[family]
    folder = of_bytes(tmp_path / "model", template, "<s>", ends[-1], *ends[:-1])
    chat = [
        message
        for question, said in zip(["2+2?", "sure?"], answers, strict=True)
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": said})
    ]
    if len(ends) > 1:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(ends)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = load_tokenizer(folder, None)
    parts = trained(folder).parts(chat, [], "Row 0")
    assert [text(folder, part.written) for part in parts] == expected
    read = ""
    for place, part in zip((1, 3), parts, strict=True):
        read = text(folder, part.observation) if part.begins else read + text(folder, part.observation)
        assert read == tokenizer.apply_chat_template(
            chat[:place], add_generation_prompt=True, tokenize=False, return_dict=False
        )
        read += text(folder, part.written)


CALL = {"role": "assistant", "content": "I add.", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def test_tool_call_is_trained_where_written_else_refused(tmp_path: Path) -> None:
    writes = of_bytes(tmp_path / "writes", CHATML, "<s>", "<|im_end|>")
    (part,) = trained(writes).parts([CHAT[0], CALL], [], "Row 0")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert text(writes, part.written) == f"I add.\n{call}<|im_end|>"
    drops = of_bytes(tmp_path / "drops", LLAMA, "<s>", "<|eot_id|>")
    with pytest.raises(ConfigError, match=r"Row 3: the chat template renders 'I add\. add' as 'I add\.'"):
        trained(drops).parts([CHAT[0], CALL], [], "Row 3")
    ended = {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<|im_end|>"}}}]}
    with pytest.raises(ConfigError, match=r"Row 4: .*holds the token which ends an answer"):
        trained(writes).parts([CHAT[0], ended], [], "Row 4")


MARKED = (
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>{% endgeneration %}"
    "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
"""Marks exactly what a template without marks gives an answer."""


def test_template_marks_train_what_transformers_mask_says(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    marked, plain = (
        trained(model, template, tmp_path).parts(CHAT, [], "Row 0")
        for template in (MARKED, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    )
    assert marked == plain
    assert [text(model, turn.written) for turn in marked] == ["a/4<e>", "b/yes<e>"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = MARKED
    theirs = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ours = [(token, bit) for turn in marked for token, bit in _with_mask(turn)]
    assert ours == list(zip(theirs["input_ids"], theirs["assistant_masks"], strict=True))


def _with_mask(turn: Any) -> list[tuple[int, int]]:
    return [*((token, 0) for token in turn.observation), *((token, 1) for token in turn.written)]


def test_marks_decide_whether_the_end_of_an_answer_is_trained(model: Path, tmp_path: Path) -> None:
    without_end = MARKED.replace("<e>{% endgeneration %}", "{% endgeneration %}<e>")
    first, second = trained(model, without_end, tmp_path).parts(CHAT, [], "Row 0")
    assert [text(model, turn.written) for turn in (first, second)] == ["a/4", "b/yes"]
    assert text(model, second.observation) == "<e><s>user:sure<e><s>assistant:"


def test_marks_around_nothing_are_refused(model: Path, tmp_path: Path) -> None:
    mark = "{% if m.role == 'x' %}{% generation %}{% endgeneration %}{% endif %}"
    nothing = "{% for m in messages %}{{ m.content }}<e>" + mark + "{% endfor %}"
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*Row 5: the chat template marks nothing"):
        trained(model, nothing, tmp_path).parts(CHAT, [], "Row 5")


def test_whatever_the_version_tokens_are_not_stale(model: Path) -> None:
    trajectory = trajectory_of(trained(model).parts(CHAT, [], "Row 0"), 7)
    assert Group("g", 0, [], [trajectory], "chat").staleness(7) == [0]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content | upper }}<e>{% endfor %}", "renders 'b/yes' as 'B/YES'"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "the end of an answer behind it"),
        ("{% for m in messages | reverse %}{{ m.content }}<e>{% endfor %}", "behind its generation prompt"),
    ],
)
def test_template_that_changes_an_answer_is_refused(model: Path, tmp_path: Path, template: str, problem: str) -> None:
    chat = [CHAT[0], CHAT[3]]
    with pytest.raises(ConfigError, match=rf"model\.chat_template: .*Row 9: the chat template .*{problem}"):
        trained(model, template, tmp_path).parts(chat, [], "Row 9")


def test_messages_that_the_template_rejects_are_refused(model: Path, tmp_path: Path) -> None:
    rejects = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"Row 9: the chat template rejects its messages \(roles must alternate\)"):
        trained(model, rejects, tmp_path).parts([CHAT[0], CHAT[3]], [], "Row 9")


def test_answer_with_the_token_that_ends_one_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"Row 3: .*holds the token which ends an answer"):
        trained(model).parts([CHAT[0], {"role": "assistant", "content": "4<e>5"}], [], "Row 3")


def test_text_that_the_tokens_cannot_spell_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "tiny")
    chat = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "1x"}]
    with pytest.raises(ConfigError, match=r"Row 4: the model's tokens do not spell '1x<eos>'"):
        trained(tmp_path / "tiny").parts(chat, [], "Row 4")


def rows_of(path: Path, rows: list[Any], **changes: Any) -> ChatRows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = compose_values("experiment=warmup", "model=tiny")["task"]
    return ChatRows(TaskConfig.model_validate({**values, "train_file": str(path), **changes}))


def test_rows_are_conversations_or_pairs(tmp_path: Path) -> None:
    end = [{"role": "assistant", "content": "4"}]
    rows = rows_of(
        tmp_path / "rows.jsonl",
        [
            {"messages": CHAT},
            {"messages": "2+2", "completion": "4"},
            {"messages": CHAT[:1], "completion": end, "tools": [{"type": "function"}]},
        ],
        system="brief",
    )
    head = {"role": "system", "content": "brief"}
    assert rows.conversation(0) == ([head, *CHAT], [])
    assert rows.conversation(1) == ([head, *CHAT[:1], *end], [])
    assert rows.conversation(2) == ([head, *CHAT[:1], *end], [{"type": "function"}])
    assert rows.question(1) == {"messages": [head, *CHAT[:1]], "tools": [], "answer": "4"}


def test_pairs_have_settable_names_and_datasets_splits(tmp_path: Path) -> None:
    own = rows_of(tmp_path / "own.jsonl", [{"q": "1", "a": "2"}], prompt_key="q", answer_key="a")
    assert own.conversation(0)[0][-1]["content"] == "2"
    pytest.importorskip("asyncrl.extensions.datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train-00000.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    changes = {"train_file": None, "dataset": str(tmp_path / "set"), "train_split": "train"}
    assert rows_of(tmp_path / "none.jsonl", [], **changes).conversation(0) == (CHAT, [])


def test_memory_holds_the_places_of_rows_alone(tmp_path: Path) -> None:
    """So a million rows need some megabytes; the digest, which checkpoints have, is that of all rows in one list."""
    rows = [{"messages": [{**CHAT[0], "content": f"{number} " * 200}, CHAT[1]]} for number in range(2_000)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    read = rows_of(tmp_path / "none.jsonl", [], train_file=str(file))
    digest = read.digest()
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < most < file.stat().st_size / 4
    assert digest == hashlib.sha256(msgspec.json.encode(rows)).hexdigest()
    assert [read.conversation(number)[0] for number in (1_999, 0, 7)] == [rows[n]["messages"] for n in (1_999, 0, 7)]


def test_rows_to_evaluate_that_are_not_asked_are_not_tokenized(model: Path) -> None:
    """A batch has the rows that it names, although those between are left out."""
    policy: Any = SimpleNamespace(folder=model, hf={"max_position_embeddings": 512})
    chats = [[{**CHAT[0], "content": str(number)}, CHAT[1]] for number in range(6)]
    refused = {2, 3}
    rows: Any = SimpleNamespace(
        named=str,
        rendered=lambda number: None,
        conversation=lambda number: ([] if number in refused else chats[number], []),
    )
    conversations = Conversations(tiny_config(), policy, rows)
    conversations.read(range(2))
    conversations.read(range(4, 6))
    prompts = [text(model, group.prompt_ids) for group in conversations.groups([5, 1, 4], 0)]
    assert prompts == [f"<s>user:{number}<e><s>assistant:" for number in (5, 1, 4)]


def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": CHAT}, {"messages": [{**CHAT[0], "name": "x"}, CHAT[1]]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = rows_of(tmp_path / "none", [], train_file=str(tmp_path / "rows.parquet"))
    assert [read.conversation(number)[0] for number in range(2)] == [row["messages"] for row in rows]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "hello"}, r"task\.prompt_key: .*Row 1 .*has only the fields \['text'\]"),
        ({"messages": CHAT[:3]}, r"task\.answer_key: .*Row 1 .*ends without a message of the assistant"),
        ({"messages": []}, r"task\.answer_key: .*ends without a message"),
        ({"messages": [{"content": "x"}]}, r"task\.prompt_key: .*list of messages with role"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"task\.prompt_key: .*text as content"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{}]}]},
            r"task\.prompt_key: .*names in tool_calls",
        ),
        ({"messages": 5}, r"task\.prompt_key: .*Row 1 .*list of messages"),
        ({"messages": CHAT, "tools": 5}, r"task\.train_file: .*Row 1 .*no list"),
    ],
)
def test_row_that_is_no_conversation_is_refused_with_its_number(tmp_path: Path, row: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rows_of(tmp_path / "rows.jsonl", [{"messages": CHAT}, row])


@pytest.mark.parametrize("texts", ["abc", [], ["context"], ["context", ""], ["context", 1]])
def test_texts_that_do_not_alternate_are_refused(tmp_path: Path, texts: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({RENDERED: texts}) + "\n")
    values = compose_values("experiment=warmup", "model=tiny")["task"]
    with pytest.raises(ConfigError, match=r"task\.train_file: .*Row 0 .*context and trained text, alternately"):
        ChatRows(TaskConfig.model_validate({**values, "train_file": str(tmp_path / "rows.jsonl")}))
