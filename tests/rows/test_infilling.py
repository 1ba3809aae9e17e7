"""Fill-in-the-middle documents, compared with a transformation written from the papers.

The oracle knows arXiv:2207.14255 and the library tokenizers, and none of our code: it says what a
document is, given its three parts.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mens_exp.config.validate import problems_of
from mens_exp.corpus.source import labelling_of
from mens_exp.errors import ConfigError, DataError
from mens_exp.planning.checks.model import check_model
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.tokenizer.implementations import HfTokenizer, VoxTokenizer

PRE, SUF, MID, END = "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<end>"
CODE = [
    f"def add_{n}(x, y):\n    total = x + y * {n}\n    return total  # the sum, π × {n}\n"
    for n in range(400)
]


def saved(place, *, special=True, tokens=(PRE, SUF, MID), decoder=True):
    """Train a byte-level BPE with merges, so that cuts fall inside tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=not decoder)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CODE, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([END])
    (core.add_special_tokens if special else core.add_tokens)(list(tokens))
    core.save(str(place / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": "{{ messages[0].content }}"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return HfTokenizer.from_directory(place), core


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("code"))


def labelling(seq_len=512, **settings):
    options = {"rate": 0.5, "split_seed": 0, "spm_rate": 0.5, **settings}
    return Labelling(objective="fim", seq_len=seq_len, options=tuple(options.items()))


def rows(texts, **keys):
    return [parse_row({"text": text, **keys}, "code.jsonl:1") for text in texts]


def documents(encoder, texts, seq_len=512, **settings):
    found = encode(rows(texts), encoder, labelling(seq_len, **settings))
    bounds = zip(found.offsets[:-1], found.offsets[1:], strict=True)
    return [found.ids[a:b].tolist() for a, b in bounds], found


class Paper:
    """A document's construction according to the papers."""

    def __init__(self, core):
        self.core = core
        self.pre, self.suf, self.mid, self.end = map(core.token_to_id, (PRE, SUF, MID, END))

    def encode(self, text):
        return self.core.encode(text, add_special_tokens=False).ids

    def psm(self, prefix, middle, suffix):
        prefix, middle, suffix = map(self.encode, (prefix, middle, suffix))
        return [self.pre, *prefix, self.suf, *suffix, self.mid, *middle, self.end]

    def spm(self, prefix, middle, suffix):
        prefix, middle, suffix = map(self.encode, (prefix, middle, suffix))
        return [self.pre, self.suf, *suffix, self.mid, *prefix, *middle, self.end]

    def read(self, ids, text):
        """Return the document's kind and its cuts, or fail if it does not match the text."""
        if ids == [*self.encode(text), self.end]:
            return "plain", None
        suffix_from = ids.index(self.suf)
        suffix = self.core.decode(ids[suffix_from + 1 : ids.index(self.mid)])
        last = len(text) - len(suffix)
        if suffix_from == 1 and ids == self.psm("", text[:last], suffix):
            return "either", (0, last)
        kind = "spm" if suffix_from == 1 else "psm"
        make = getattr(self, kind)
        first = [i for i in range(last + 1) if ids == make(text[:i], text[i:last], text[last:])]
        assert first, (kind, self.core.decode(ids, skip_special_tokens=False), text)
        return kind, (first[0], last)


def test_every_document_is_one_of_the_paper_s(both):
    """PSM, SPM and plain text occur in their shares, and every token is supervised."""
    encoder, core = both
    made, found = documents(encoder, CODE)
    assert len(made) == len(CODE)
    kinds = Counter(Paper(core).read(*one)[0] for one in zip(made, CODE, strict=True))
    for kind, share in (("plain", 0.5), ("psm", 0.25), ("spm", 0.25)):
        deviation = (share * (1 - share) / len(CODE)) ** 0.5
        assert abs(kinds[kind] / len(CODE) - share) < 4 * deviation, kinds
    assert found.supervised.sum() == len(found.ids) - len(CODE)  # all but the first token


def test_cuts_are_uniform_over_characters(both):
    """The lower and upper of two uniform cuts average 1/3 and 2/3."""
    encoder, core = both
    made, _ = documents(encoder, CODE, rate=1.0, spm_rate=0.0)
    cuts = [Paper(core).read(*one)[1] for one in zip(made, CODE, strict=True)]
    shares = [(a / len(t), b / len(t)) for (a, b), t in zip(cuts, CODE, strict=True)]
    deviation = (1 / 18 / len(CODE)) ** 0.5  # standard error of the mean of the order statistics
    for which, mean in ((0, 1 / 3), (1, 2 / 3)):
        assert abs(sum(one[which] for one in shares) / len(CODE) - mean) < 4 * deviation


def test_a_token_is_cut_where_the_text_is(both):
    """Parts are tokenized apart, so most documents have more tokens than the whole text."""
    encoder, core = both
    made, _ = documents(encoder, CODE, rate=1.0)
    whole = [len(core.encode(text, add_special_tokens=False).ids) + 4 for text in CODE]
    more = [len(ids) - length for ids, length in zip(made, whole, strict=True)]
    assert min(more) >= 0
    assert sum(extra > 0 for extra in more) > len(CODE) / 2


def test_documents_depend_on_the_seed_and_the_row_alone(both):
    """The order and the other rows do not matter; another seed cuts elsewhere."""
    encoder, _ = both
    made, _ = documents(encoder, CODE[:40])
    again, _ = documents(encoder, CODE[:40][::-1])
    assert again[::-1] == made
    other, _ = documents(encoder, CODE[:40], split_seed=1)
    assert other != made


@pytest.mark.parametrize("seq_len", [64, 40])
def test_a_long_text_has_a_middle_in_each_piece(both, seq_len):
    """Pieces are not truncated, and undoing the transformation gives the text."""
    encoder, core = both
    text = "".join(CODE[:20])
    made, found = documents(encoder, [text], seq_len=seq_len, rate=1.0, spm_rate=0.0)
    assert max(map(len, made)) <= seq_len
    assert found.truncated == found.dropped == 0
    assert found.unrolled == len(made) - 1 > 10
    paper = Paper(core)
    undone = []
    for ids in made:
        if ids[0] != paper.pre:
            undone.append(core.decode(ids))
            continue
        at = [ids.index(one) for one in (paper.suf, paper.mid)]
        prefix, suffix, middle = ids[1 : at[0]], ids[at[0] + 1 : at[1]], ids[at[1] + 1 : -1]
        undone.append(core.decode(prefix) + core.decode(middle) + core.decode(suffix))
    assert "".join(undone) == text


def test_tokens_that_are_given_are_taken(tmp_path):
    """The order is prefix, suffix, middle."""
    own = ("<a>", "<b>", "<c>")
    encoder, core = saved(tmp_path, tokens=own)
    (ids,), _ = documents(encoder, CODE[:1], rate=1.0, spm_rate=0.0, tokens=list(own))
    found = [core.id_to_token(one) for one in ids if core.id_to_token(one) in own]
    assert found == list(own)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    """The error names the model and a remedy; missing given tokens are refused too."""
    encoder, _ = saved(tmp_path, tokens=())
    with pytest.raises(ConfigError, match="no tokens to fill in the middle with") as caught:
        documents(encoder, CODE[:1])
    assert caught.value.where == "objective.tokens"
    with pytest.raises(ConfigError, match="found <x>, <y>, <z>"):
        documents(encoder, CODE[:1], tokens=["<x>", "<y>", "<z>"])
    with pytest.raises(ConfigError, match="no tokens to fill in the middle with"):
        documents(VoxTokenizer(), ["let x"])


def test_a_model_without_tokens_is_refused_before_its_rows_are_read(tiny_config, tiny_base):
    """Planning refuses it too, unless objective.tokens names existing tokens."""
    model = ("model=hf", f"model.id={tiny_base.directory}", "objective=fim")
    with pytest.raises(ConfigError, match="no tokens to fill in the middle with"):
        list(check_model(tiny_config(*model)))
    own = 'objective.tokens=["<|im_start|>","<|im_end|>","<|endoftext|>"]'
    list(check_model(tiny_config(*model, own)))


def test_a_tokenizer_that_adds_a_space_to_parts_is_refused(tmp_path):
    """Joined, the parts would differ from the text."""
    encoder, _ = saved(tmp_path, decoder=False)
    with pytest.raises(ConfigError, match="changes the parts of a text"):
        documents(encoder, CODE[:1])


def test_a_conversation_is_refused(both):
    """A conversation has no middle to fill in."""
    pair = parse_row({"prompt": "p", "response": "r"}, "code.jsonl:7")
    with pytest.raises(DataError, match="the row is a conversation") as caught:
        encode([pair], both[0], labelling())
    assert "code.jsonl:7" in caught.value.where


def test_a_text_that_spells_a_token_stays_text(both, tmp_path):
    """It is encoded as characters if the token is special; otherwise the row is refused."""
    encoder, core = both
    text = f"x = '{MID}'\n"
    (ids,), _ = documents(encoder, [text], rate=1.0)
    assert ids.count(core.token_to_id(MID)) == 1
    encoder, _ = saved(tmp_path, special=False)
    with pytest.raises(DataError, match=f"found {MID}"):
        documents(encoder, [text])
    assert documents(encoder, CODE[:1])[0]


def test_weights_reach_every_piece(both):
    """The row's weight applies to each document made from it."""
    pairs = rows(["".join(CODE[:5])], fields={"quality": 0.5})
    options = labelling(64, weight_field="quality")
    assert set(encode(pairs, both[0], options).extra["weight"].tolist()) == {0.5}


def test_the_settings_reach_the_labelling(tiny_config):
    """The settings are part of the cache key."""
    config = tiny_config("objective=fim", "objective.rate=0.9", "objective.tokens=[a,b,c]")
    found = dict(labelling_of(config).options)
    assert found == {"rate": 0.9, "split_seed": 0, "spm_rate": 0.5, "tokens": ["a", "b", "c"]}


@pytest.mark.parametrize(
    "override",
    [
        "objective.rate=0",
        "objective.spm_rate=1.1",
        "objective.tokens=[a,b]",
        "objective.tokens=[a,b,a]",
        "data.seq_len=31",
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(tiny_config, override):
    """The error names the setting."""
    found = problems_of(tiny_config("objective=fim", override))
    assert any(override.partition("=")[0] in str(one) for one in found)
