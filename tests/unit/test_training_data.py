"""The text of the training example: the same for every rank, every run, and after a resume."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from mixtral.data import Windows, load_corpus, micro_batches


def text_of(tensor):
    return bytes(tensor.tolist())


def test_one_file_is_split_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(tmp_path / "a.txt")
    assert text_of(corpus.train) == bytes(range(1, 96))
    assert text_of(corpus.validation) == bytes(range(96, 101))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in (("c.txt", "third"), ("a.txt", "first"), ("b/x.txt", "second")):
        (tmp_path / name).write_text(content)
    (tmp_path / ".hidden").write_text("never")
    (tmp_path / "picture.bin").write_bytes(b"\x89\0\0")
    corpus = load_corpus(tmp_path)
    assert text_of(corpus.train) + text_of(corpus.validation) == b"first\0second\0third"


def test_every_twentieth_of_many_documents_is_for_validation(tmp_path):
    lines = [json.dumps({"text": f"d{i}"}) for i in range(1, 41)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    corpus = load_corpus(tmp_path / "a.jsonl")
    assert text_of(corpus.validation) == b"d20\0d40"
    assert text_of(corpus.train).count(b"\0") == 37


@pytest.mark.parametrize("line", ["no json", '{"txt": "x"}', '"just a string"', '{"text": 3}'])
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected .*text"):
        load_corpus(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="no text"):
        load_corpus(tmp_path)


def test_the_default_text_is_the_standard_library():
    corpus = load_corpus(None)
    assert len(corpus.train) > 5e6 and len(corpus.validation) > 1e5
    assert b"import argparse" in text_of(corpus.train[:2_000_000])
    assert corpus.fingerprint == load_corpus(None).fingerprint


def test_labels_are_the_next_byte():
    windows = Windows(torch.arange(9).byte(), seq_len=4, seed=None)
    tokens, labels = windows.samples([0, 1])
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_an_epoch_holds_every_window_once_and_the_next_is_shuffled_anew():
    windows = Windows(torch.arange(101).byte(), seq_len=10, seed=5)
    epochs = [windows.samples(range(e * 10, e * 10 + 10))[0][:, 0].tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1]


def test_a_sample_depends_on_its_number_only():
    text = torch.randint(256, (5000,)).byte()
    straight, resumed = (Windows(text, seq_len=16, seed=1) for _ in range(2))
    for index in range(700):
        straight.samples([index])
    assert torch.equal(straight.samples([700, 3])[0], resumed.samples([700, 3])[0])


def test_each_sample_of_a_step_goes_to_one_rank():
    windows = Windows(torch.arange(241).byte(), seq_len=2, seed=None)
    firsts = []
    for dp_rank in range(3):
        for tokens, _ in micro_batches(windows, 24, 4, 2, 3, dp_rank):
            assert tokens.shape == (4, 2)
            firsts += (tokens[:, 0] // 2).tolist()
    assert sorted(firsts) == list(range(24, 48))


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(ValueError, match=r"has 10 bytes.*at least 17"):
        Windows(torch.zeros(10).byte(), seq_len=16, seed=None)
