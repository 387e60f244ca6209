"""Sources, encoding, packing and the stream's place: values by hand and by algebra."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from runtime.config import DataConfig
from runtime.data.order import Order
from runtime.data.sources import TEXT_DOCUMENT, open_source
from runtime.data.stream import IGNORED, Place, Prefetcher, Rows, Stream
from runtime.data.tokens import ByteTokenizer, Encoder
from runtime.refusal import Refused

END = 257
RECORDS = [{"text": "x" * n + chr(65 + n)} for n in (3, 7, 1, 12, 5, 9, 2)]


def jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def stream(
    config: DataConfig, lanes: int, mine: list[int], places: list[Place] | None = None, microbatch: int = 1
) -> Stream:
    encoder = Encoder(config, ByteTokenizer(END), 320)
    source = open_source(config)
    return Stream(source, encoder, config, lanes=lanes, mine=mine, microbatch=microbatch, places=places)


def documents(rows: list[Rows]) -> list[list[int]]:
    """Every document piece that the rows hold, padding left out."""
    found = []
    for row in rows:
        for ids, labels, positions, lengths in zip(row.ids, row.labels, row.positions, row.lengths, strict=True):
            begin = 0
            for length in lengths:
                piece = slice(begin, begin + length)
                assert positions[piece].tolist() == list(range(length))
                if bool((labels[piece] != IGNORED).any()):
                    found.append(ids[piece].tolist())
                begin += length
            assert begin == len(ids)
    return found


# ---- sources ----------------------------------------------------------------------------------------------------


def test_jsonl_records_are_found_by_number_past_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "é"}\n\n  \n{"text": "b"}')
    jsonl(tmp_path / "b.jsonl", [{"text": "c"}])
    source = open_source(DataConfig(files=(str(tmp_path / "*.jsonl"),)))
    assert [source.read(i)["text"] for i in (2, 0, 1)] == ["c", "é", "b"]
    assert source.where(2).endswith("b.jsonl, record 1")


def test_parquet_rows_are_read_in_any_order(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    words = [f"word {i}" for i in range(23)]
    parquet.write_table(arrow.table({"text": words}), tmp_path / "a.parquet", row_group_size=4)
    source = open_source(DataConfig(files=(str(tmp_path / "a.parquet"),)))
    assert len(source) == 23
    assert [source.read(i)["text"] for i in reversed(range(23))] == words[::-1]


def test_a_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(30_000)) + "y" * (TEXT_DOCUMENT + 5)
    (tmp_path / "a.txt").write_text(text)
    source = open_source(DataConfig(files=(str(tmp_path / "a.txt"),)))
    pieces = [source.read(i)["text"] for i in range(len(source))]
    assert "".join(pieces) == text
    assert all(len(p) <= TEXT_DOCUMENT and p.endswith("\n") for p in pieces[:-1])


def test_files_behind_an_address_are_read_like_local_ones() -> None:
    with fsspec.open("memory://corpus/a.jsonl", "w") as file:
        file.write('{"text": "remote"}\n')
    assert open_source(DataConfig(files=("memory://corpus/*.jsonl",))).read(0) == {"text": "remote"}


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", "", "data-empty"),
        ("a.jsonl", "\n\n", "data-empty"),
        ("a.bin", "x", "data-format"),
        ("a.parquet", "not parquet", "data-not-parquet"),
        (None, "", "data-missing"),
    ],
)
def test_unusable_files_are_refused_with_the_fix(tmp_path: Path, name: str | None, content: str, kind: str) -> None:
    if name is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(Refused) as refused:
        open_source(DataConfig(files=(str(tmp_path / (name or "absent.jsonl")),)))
    assert refused.value.kind == kind
    assert refused.value.detail


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("{broken", "data-not-json"),
        ("[1]", "data-not-json"),
        ('{"body": "x"}', "data-field"),
        ('{"messages": "hi"}', "data-conversation"),
        ('{"text": "a"}', "data-empty"),  # one byte and no end token: nothing to predict
    ],
)
def test_unusable_records_are_refused_by_place(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    config = DataConfig(files=(str(tmp_path / "a.jsonl"),), sequence_length=8)
    encoder = Encoder(config, ByteTokenizer(None), 320)
    with pytest.raises(Refused) as refused:
        Stream(open_source(config), encoder, config, lanes=1, mine=[0], microbatch=1).step()
    assert refused.value.kind == kind
    assert kind == "data-empty" or "a.jsonl, record 1" in refused.value.title or "record 1" in refused.value.title


# ---- encoding ---------------------------------------------------------------------------------------------------


def test_only_what_the_assistant_says_is_trained() -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sûr?"},
        {"role": "assistant", "content": "oui"},
    ]
    config = DataConfig(files=("x",))
    document = Encoder(config, ByteTokenizer(END), 320)({"messages": messages}, "here")
    assert bytes(document.ids.tolist()).decode() == "user: 2+2?\nassistant: 4\nuser: sûr?\nassistant: oui\n"
    assert bytes(document.ids[document.trained].tolist()) == b"4\noui\n"


def test_a_question_with_an_answer_trains_the_answer_and_its_end() -> None:
    document = Encoder(DataConfig(files=("x",)), ByteTokenizer(END), 320)({"prompt": "ab", "completion": "c"}, "here")
    assert document.ids.tolist() == [97, 98, 99, END]
    assert document.trained.tolist() == [False, False, True, True]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(Refused, match="answers cannot be found"):
        Encoder(DataConfig(files=("x",)), ByteTokenizer(END, template), 320)({"messages": messages}, "here")


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(Refused, match="outside the model's vocabulary"):
        Encoder(DataConfig(files=("x",)), ByteTokenizer(END), 100)({"text": "zz"}, "here")


# ---- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 4, 7, 100])
def test_every_epoch_holds_every_record_once_in_another_order(block: int) -> None:
    order = Order(23, block=block, shuffle=True, seed=3)
    epochs = [[order.record(e * 23 + i) for i in range(23)] for e in range(3)]
    assert all(sorted(e) == list(range(23)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    fresh = Order(23, block=block, shuffle=True, seed=3)
    assert [fresh.record(23 + i) for i in range(23)] == epochs[1]  # found without the epoch before
    assert [Order(5, block=block, shuffle=False, seed=3).record(i) for i in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_records_of_a_block_stay_together() -> None:
    order = Order(20, block=4, shuffle=True, seed=0)
    groups = [{order.record(i) // 4 for i in range(b, b + 4)} for b in range(0, 20, 4)]
    assert all(len(g) == 1 for g in groups)


# ---- packing ----------------------------------------------------------------------------------------------------


def test_rows_that_are_cut_hold_every_token_and_predict_across_the_cut(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    config = DataConfig(files=(path,), sequence_length=8, packing="cut", shuffle=False)
    data = stream(config, 1, [0])
    rows = [data.step()[0] for _ in range(8)]
    flat = torch.cat([r.ids[0] for r in rows]).tolist()
    whole = list(chain.from_iterable([*r["text"].encode(), END] for r in RECORDS))
    assert flat[: len(whole)] == whole[: len(flat)]
    labels = torch.cat([r.labels[0] for r in rows]).tolist()
    for here, (label, following) in enumerate(zip(labels[:-1], flat[1:], strict=True)):
        assert label == (IGNORED if flat[here] == END else following)


@pytest.mark.parametrize("packing", ["whole", "none"])
def test_whole_documents_stay_whole_and_padding_is_a_document_of_its_own(tmp_path: Path, packing: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    config = DataConfig(files=(path,), sequence_length=11, packing=packing, shuffle=False)  # type: ignore[arg-type]
    data = stream(config, 1, [0])
    found = documents([data.step()[0] for _ in range(8)])
    expected = []
    for record in RECORDS:
        ids = [*record["text"].encode(), END]
        expected += [ids[i : i + 11] for i in range(0, len(ids), 11)]
    expected = [e for e in expected if len(e) > 1]  # a cut-off last token predicts nothing
    assert found[: len(expected)] == expected[: len(found)]
    if packing == "none":
        assert all(len(r.lengths[0]) <= 2 for r in [data.step()[0] for _ in range(3)])


def test_boundaries_are_cumulative_over_all_rows() -> None:
    empty = torch.zeros(2, 4, dtype=torch.long)
    rows = Rows(ids=empty, labels=empty, positions=empty, mask=empty > 0, lengths=((1, 3), (2, 1, 1)))
    assert rows.cu_seqlens.tolist() == [0, 1, 4, 6, 7, 8]


# ---- the stream's place -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_a_stream_taken_up_anywhere_goes_on_exactly_with_any_number_of_ranks(tmp_path: Path, packing: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    config = DataConfig(files=(path,), sequence_length=10, packing=packing, seed=4)  # type: ignore[arg-type]
    whole = stream(config, 4, [0, 1, 2, 3])
    steps = [torch.cat([r.ids for r in whole.step()]) for _ in range(9)]
    for stop, ranks in ((0, 2), (3, 4), (5, 2), (7, 1)):
        again = stream(config, 4, [0, 1, 2, 3])
        for _ in range(stop):
            again.step()
        places = again.places()
        share = 4 // ranks
        parts = [stream(config, 4, list(range(r * share, (r + 1) * share)), places, share) for r in range(ranks)]
        for expected in steps[stop:]:
            assert torch.equal(torch.cat([r.ids for p in parts for r in p.step()]), expected)


def test_the_prefetcher_hands_out_the_same_steps_and_keeps_their_places(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", RECORDS)
    config = DataConfig(files=(path,), sequence_length=10)
    plain, ahead = stream(config, 2, [0, 1]), Prefetcher(stream(config, 2, [0, 1]))
    assert ahead.places() == [(0, 0), (1, 0)]
    for _ in range(5):
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(plain.step(), ahead.step(), strict=True))
        assert ahead.places() == plain.places()
    ahead.close()


def test_what_the_prefetching_thread_raises_reaches_the_caller(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{broken\n')
    ahead = Prefetcher(stream(DataConfig(files=(str(tmp_path / "a.jsonl"),), shuffle=False, sequence_length=3), 1, [0]))
    ahead.step()
    with pytest.raises(Refused, match="record 2 is not JSON"):
        ahead.step()
    ahead.close()
