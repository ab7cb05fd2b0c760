"""The quality harness: against attention computed token by token, and on the shipped sample."""

import json
import os
import pickle
import stat
import sys
import zipfile
from contextlib import suppress
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy

import kvcodec as kv
from kvcodec.evaluation import (
    DEFAULT_NAMES,
    GREEDY_NAMES,
    MODEL_NAMES,
    NEEDLE_NAMES,
    Tensors,
    attention_quality,
    check_pair,
    check_plot,
    check_writable,
    codec_pair,
    draw_plot,
    evaluate_attention,
    load_tensors,
    make_table,
    print_table,
    sample_tensors,
    to_json,
    write_file,
)
from kvcodec.evaluation.codecs import distinct_pairs


def random_tensors(layers=1, q_heads=4, kv_heads=2, tokens=260, head_dim=64, value_dim=64):
    """Keys with channel offsets, queries for the first tokens and for some later ones."""
    rng = np.random.default_rng(7)
    positions = np.array([3, 20, 60, 98, 99, 162, 163, 200, 226, 227, 259])
    q = rng.standard_normal((layers, q_heads, len(positions), head_dim), dtype=np.float32)
    k = rng.standard_normal((layers, kv_heads, tokens, head_dim), dtype=np.float32)
    v = rng.standard_normal((layers, kv_heads, tokens, value_dim), dtype=np.float32)
    k += 3 * rng.standard_normal((layers, kv_heads, 1, head_dim), dtype=np.float32)
    return Tensors(q=q, k=k, v=v, positions=positions, source="random")


def one_layer(tensors, index):
    layer = slice(index, index + 1)
    return replace(tensors, q=tensors.q[layer], k=tensors.k[layer], v=tensors.v[layer])


@pytest.fixture(scope="module")
def tensors():
    return random_tensors()


@pytest.fixture(scope="module")
def of_sample():
    """Rows of the shipped sample, by name."""
    names = ["int4 unrotated", "int4 plain", "int4 centered", "int4", "lm4/lm4", "lm4/lm2"]
    rows = evaluate_attention(sample_tensors(), [codec_pair(name) for name in names])
    return {row.name: row for row in rows}


@pytest.fixture(scope="module")
def rows(tensors):
    return evaluate_attention(tensors, [codec_pair(name) for name in ("fp16", "int4", "kivi2")])


class TestSample:
    def test_rotation_cuts_the_divergence_by_a_third(self, of_sample):
        assert of_sample["int4 plain"].mean_kl < 2 / 3 * of_sample["int4 unrotated"].mean_kl

    def test_centering_and_equalizing_each_cut_it_further(self, of_sample):
        assert of_sample["int4 centered"].mean_kl < 0.8 * of_sample["int4 plain"].mean_kl
        assert of_sample["int4"].mean_kl < 0.9 * of_sample["int4 centered"].mean_kl

    def test_codecs_with_the_same_keys_differ_by_the_values_alone(self, of_sample):
        four, two = of_sample["lm4/lm4"], of_sample["lm4/lm2"]
        assert four.mean_kl == two.mean_kl
        assert four.key_relative_mse == two.key_relative_mse
        assert four.value_relative_mse < two.value_relative_mse
        assert four.output_relative_error < two.output_relative_error
        assert four.output_cosine > two.output_cosine
        assert four.bits_per_value == two.bits_per_value + 1

    def test_lloyd_max_values_have_the_published_distortion(self, of_sample):
        assert of_sample["lm4/lm4"].value_relative_mse == pytest.approx(0.0095, rel=0.1)
        assert of_sample["lm4/lm2"].value_relative_mse == pytest.approx(0.1175, rel=0.1)


class TestFigures:
    @pytest.mark.parametrize("name", ["int8", "int4", "kivi4", "kivi2 g128", "lm4/lm2"])
    def test_the_output_is_that_of_windowed_attention(self, tensors, name):
        pair = codec_pair(name)
        [row] = evaluate_attention(tensors, [pair], sinks=5, recent=20)
        q, k, v, positions = tensors.q, tensors.k, tensors.v, tensors.positions
        counted = positions >= 5 + 20 + pair.block - 1
        output = kv.windowed_attention(
            q, k, v, pair.key, pair.value, sinks=5, recent=20, positions=positions
        )[:, :, counted]
        exact = kv.attention(q, k, v, causal=True, positions=positions)[:, :, counted]
        error = np.linalg.norm(output - exact) / np.linalg.norm(exact)
        assert row.output_relative_error == pytest.approx(error, rel=1e-6)
        cosines = (output * exact).sum(-1) / (
            np.linalg.norm(output, axis=-1) * np.linalg.norm(exact, axis=-1)
        )
        assert row.output_cosine == pytest.approx(cosines.mean(), rel=1e-6)

    @pytest.mark.parametrize("name", ["int4", "kivi4"])
    def test_the_divergence_is_that_of_decoding_token_by_token(self, tensors, name):
        sinks, recent = 4, 32
        pair = codec_pair(name)
        [row] = evaluate_attention(tensors, [pair], sinks=sinks, recent=recent)
        early = tensors.positions < sinks + pair.block
        queries = tensors.q[:, :, early] if name == "int4" else None
        encoded = pair.key.encode(tensors.k[:, :, sinks:], queries=queries)
        exact_scores = kv.scores(tensors.q, tensors.k)
        packed_scores = kv.scores(tensors.q, encoded)
        divergences = []
        for index, position in enumerate(tensors.positions):
            packed = 0
            for seen in range(1, position + 2):
                if seen - sinks - packed - recent >= pair.block:
                    packed += pair.block
            if packed:
                exact = exact_scores[0, :, index, : position + 1].astype(np.float64)
                quantized = exact.copy()
                quantized[:, sinks : sinks + packed] = packed_scores[0, :, index, :packed]
                p, q = (np.exp(log_softmax(s, axis=-1)) for s in (exact, quantized))
                divergences.append(entropy(p, q, axis=-1))
        assert len(divergences) == 7
        assert row.mean_kl == pytest.approx(np.mean(divergences), rel=1e-9)

    def test_errors_are_those_of_the_decoded_packed_tokens(self, tensors):
        pair = codec_pair("kivi2/lm3")
        [row] = evaluate_attention(tensors, [pair])
        packed = slice(4, 4 + 192)
        for side, x, error in (
            ("key", tensors.k, row.key_relative_mse),
            ("value", tensors.v, row.value_relative_mse),
        ):
            exact, codec = x[:, :, packed], getattr(pair, side)
            decoded = codec.decode(codec.encode(exact))
            assert error == pytest.approx(((decoded - exact) ** 2).sum() / (exact**2).sum())

    def test_half_precision_is_rounding_alone(self, tensors):
        [row] = evaluate_attention(tensors, [codec_pair("fp16")])
        assert row.bits_per_value == 16
        assert row.bytes_per_1000_tokens == 1000 * 2 * (64 + 64) * 2
        assert 0 < row.key_relative_mse < 2**-22
        assert 0 < row.value_relative_mse < 2**-22
        assert 0 < row.mean_kl < 1e-5
        assert 0 < row.output_relative_error < 1e-3
        assert row.key is None
        assert row.value is None

    @pytest.mark.parametrize("name", DEFAULT_NAMES)
    def test_bytes_are_bits(self, tensors, name):
        [row] = evaluate_attention(tensors, [codec_pair(name)])
        bits = row.bits_per_value * 1000 * 2 * (64 + 64)
        assert row.bytes_per_1000_tokens * 8 == bits
        assert row.mean_kl > 0
        assert row.name == name

    def test_values_may_have_other_channels(self):
        [row] = evaluate_attention(random_tensors(value_dim=128), [codec_pair("int8/int4")])
        assert row.bits_per_value == (64 * 8.25 + 128 * 4.125) / 192
        assert row.bytes_per_1000_tokens * 8 == row.bits_per_value * 1000 * 2 * 192

    def test_figures_are_means_over_layers_and_bytes_their_sum(self):
        both = random_tensors(layers=2)
        pairs = [codec_pair("int4/lm3")]
        [row] = evaluate_attention(both, pairs)
        apart = [evaluate_attention(one_layer(both, index), pairs)[0] for index in range(2)]
        assert apart[0].mean_kl != apart[1].mean_kl
        for name in ("key_relative_mse", "mean_kl", "output_relative_error", "output_cosine"):
            mean = (getattr(apart[0], name) + getattr(apart[1], name)) / 2
            assert getattr(row, name) == pytest.approx(mean, rel=1e-12)
        assert row.bytes_per_1000_tokens == sum(each.bytes_per_1000_tokens for each in apart)

    def test_queries_in_chunks_give_the_same(self, tensors, rows, monkeypatch):
        monkeypatch.setattr(attention_quality, "SCORES_AT_ONCE", 2 * 4 * 260)
        pairs = [codec_pair(row.name) for row in rows]
        assert evaluate_attention(tensors, pairs) == rows

    def test_progress_ends_at_one(self, tensors):
        parts = []
        pairs = [codec_pair("fp16"), codec_pair("int8")]
        evaluate_attention(tensors, pairs, progress=parts.append)
        assert parts == sorted(parts)
        assert parts[-1] == 1
        assert len(set(parts)) == len(parts) >= 4

    def test_no_pairs_give_no_rows(self, tensors):
        assert evaluate_attention(tensors, []) == []

    def test_configs_make_the_codecs_that_were_used(self, rows):
        key = kv.Codec.from_config(rows[1].key)
        assert key == kv.codec("int4").for_side("key")
        assert kv.Codec.from_config(rows[1].value) == kv.codec("int4").for_side("value")

    def test_without_early_queries_keys_are_not_equalized(self, tensors):
        late = tensors.positions > 68
        late = replace(tensors, q=tensors.q[:, :, late], positions=tensors.positions[late])
        rows = evaluate_attention(late, [codec_pair("int4"), codec_pair("int4 centered")])
        assert rows[0].key["equalize"] is False
        assert rows[0].mean_kl == rows[1].mean_kl


class TestWhatIsNotPossible:
    def test_head_dims_that_cannot_be_rotated(self):
        odd = random_tensors(head_dim=100, value_dim=100)
        with pytest.raises(ValueError, match=r"^the head_dim of k .* but 100 was given\.$"):
            check_pair(codec_pair("int4"), odd, 4, 32)
        with pytest.raises(ValueError, match=r"^the head_dim of v"):
            check_pair(codec_pair("int8/int4"), odd, 4, 32)
        check_pair(codec_pair("kivi2"), odd, 4, 32)
        with pytest.raises(ValueError, match=r"^int4 cannot be evaluated: the head_dim of k"):
            evaluate_attention(odd, [codec_pair("int4")])

    def test_no_query_sees_a_packed_token(self, tensors):
        check_pair(codec_pair("int4"), tensors, 4, 192)
        with pytest.raises(ValueError, match="position 260, but the last query is at 259"):
            check_pair(codec_pair("int4"), tensors, 4, 193)

    def test_values_beyond_float16(self, tensors):
        large = replace(tensors, v=tensors.v * 1e6)
        with pytest.raises(ValueError, match="above 65504"):
            check_pair(codec_pair("fp16"), large, 4, 32)

    @pytest.mark.parametrize("option", ["sinks", "recent"])
    @pytest.mark.parametrize("value", [-1, 1.5, "4"])
    def test_windows_are_whole_numbers(self, tensors, option, value):
        with pytest.raises(ValueError, match=f"^{option} must be a whole number"):
            evaluate_attention(tensors, [codec_pair("int8")], **{option: value})


class TestNames:
    @pytest.mark.parametrize("name", DEFAULT_NAMES)
    def test_default_names_name_themselves(self, name):
        assert codec_pair(name).name == name

    def test_names_mean_what_they_say(self):
        assert codec_pair("int4").key.for_side("key").equalize
        assert not codec_pair("int4 centered").key.for_side("key").equalize
        assert codec_pair("int4 centered").key.for_side("key").center
        assert not codec_pair("lm4/lm2 plain").key.for_side("key").center
        assert codec_pair("lm4/lm2 plain").key.rotation == "srht"
        unrotated = codec_pair("int4 unrotated")
        assert unrotated.key.rotation == unrotated.value.rotation == "none"
        assert not unrotated.key.for_side("key").center
        group = codec_pair("kivi2 g128")
        assert group.key.group_size == group.value.group_size == group.block == 128

    @pytest.mark.parametrize("name", list(kv.PRESETS))
    def test_presets_are_names(self, name):
        pair = codec_pair(name)
        assert pair.key == kv.codec(name, side="key")
        assert pair.value == kv.codec(name, side="value")

    def test_spaces_do_not_matter(self):
        assert codec_pair("  int4   plain ") == codec_pair("int4 plain")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("int5", "codec must be fp16, fp32, bf16, one of int8"),
            ("", "codec must be"),
            ("lm4/", "codec must be"),
            ("lm4/lm2/lm2", "codec must be"),
            ("int4 rotated", "codec must be"),
            ("fp16 plain", "codec must be"),
            ("fp16/int4", "codec must be"),
            ("kivi2 centered", "codec 'kivi2 centered' is not possible: center and equalize"),
            ("int4 g128", "codec 'int4 g128' is not possible: group_size"),
            ("int8 plain", "codec 'int8 plain' is the same as 'int8'"),
            ("kivi2 unrotated", "codec 'kivi2 unrotated' is the same as 'kivi2'"),
        ],
    )
    def test_other_names_are_refused(self, name, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            codec_pair(name)

    @pytest.mark.parametrize("number_types", [(), ("fp16",), ("fp32", "bf16")])
    def test_number_types_that_are_not_allowed_are_not_offered(self, number_types):
        for name in ("fp16", "fp32", "bf16"):
            if name in number_types:
                assert codec_pair(name, number_types=number_types).key is None
            else:
                offered = ", ".join([*number_types, "one of int8"])
                with pytest.raises(ValueError, match=f"^codec must be {offered}"):
                    codec_pair(name, number_types=number_types)

    def test_another_name_for_the_same_is_left_out(self):
        names = ["lm4/lm4", "fp16", "lm4", "fp32", "int4 plain", "bf16", "int4/int4", "int4"]
        kept = ["lm4/lm4", "fp16", "fp32", "int4 plain", "bf16", "int4/int4"]
        assert [pair.name for pair in distinct_pairs(map(codec_pair, names))] == kept
        assert distinct_pairs([]) == []

    def test_the_default_names_are_all_distinct(self):
        for names in (DEFAULT_NAMES, MODEL_NAMES, NEEDLE_NAMES, GREEDY_NAMES):
            assert len(distinct_pairs(map(codec_pair, names))) == len(names)


def arrays(tensors, **changes):
    every = {"q": tensors.q, "k": tensors.k, "v": tensors.v, "positions": tensors.positions}
    return {name: x for name, x in (every | changes).items() if x is not None}


class TestLoading:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_round_trip(self, tensors, tmp_path, save, dtype):
        given = {name: x.astype(dtype) for name, x in arrays(tensors, positions=None).items()}
        save(tmp_path / "t.npz", **given, positions=tensors.positions, more=np.ones(3))
        loaded = load_tensors(tmp_path / "t.npz")
        for name in ("q", "k", "v"):
            assert getattr(loaded, name).dtype == np.float32
            np.testing.assert_array_equal(getattr(loaded, name), given[name].astype(np.float32))
        np.testing.assert_array_equal(loaded.positions, tensors.positions)

    def test_one_layer_needs_no_axis(self, tensors, tmp_path):
        np.savez(tmp_path / "t.npz", q=tensors.q[0], k=tensors.k[0], v=tensors.v[0])
        loaded = load_tensors(str(tmp_path / "t.npz"))
        assert loaded.k.shape == tensors.k.shape
        np.testing.assert_array_equal(loaded.positions, np.arange(249, 260))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q": None}, "cannot be read: it must hold q, k and v, but q is missing"),
            ({"k": np.ones((2, 3))}, "k must have shape"),
            ({"v": np.ones((1, 2, 259, 64))}, "v must have the layers, heads and tokens of k"),
            ({"q": np.ones((1, 3, 11, 64))}, "q must have shape"),
            ({"q": np.ones((1, 4, 11, 32))}, "q must have shape"),
            ({"k": np.ones((1, 2, 260, 64), int)}, "k must be an array of floats"),
            ({"v": np.full((1, 2, 260, 64), np.nan)}, "v must hold finite values"),
            ({"v": np.full((1, 2, 260, 64), np.inf)}, "v must hold finite values"),
            ({"q": np.array([{}], dtype=object)}, "cannot be read: Object arrays"),
            ({"positions": np.arange(10)}, "positions must have shape"),
            ({"positions": np.zeros((1, 11), int)}, "positions must have shape"),
            ({"positions": np.arange(250, 261)}, "positions must lie from 0 to 259"),
            ({"positions": np.ones(11)}, "positions must be integers"),
            ({"positions": None, "q": np.ones((1, 4, 300, 64))}, "q must have at most"),
        ],
    )
    def test_wrong_arrays(self, tensors, tmp_path, changes, message):
        np.savez(tmp_path / "t.npz", **arrays(tensors, **changes))
        with pytest.raises(ValueError, match=message) as caught:
            load_tensors(tmp_path / "t.npz")
        assert str(caught.value).startswith(f"tensors file {tmp_path / 't.npz'}")
        assert "\n" not in str(caught.value)

    def test_no_npz_file(self, tmp_path):
        path = tmp_path / "t.npz"
        with pytest.raises(ValueError, match="No such file"):
            load_tensors(path)
        with pytest.raises(ValueError, match="cannot be read"):
            load_tensors(tmp_path)
        for content in (b"", b"text", pickle.dumps([1])):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="it is no npz file"):
                load_tensors(path)
        with open(path, "wb") as stream:
            np.save(stream, np.ones(3))
        with pytest.raises(ValueError, match="it is no npz file"):
            load_tensors(path)

    def test_members_that_are_no_arrays(self, tmp_path):
        path = tmp_path / "t.npz"
        header = b"\x93NUMPY\x01\x00\x10\x00{'descr': (((   "
        for member, content in (("q", b"text"), ("q.npy", b"text"), ("q.npy", header)):
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(member, content)
                archive.writestr("k", b"")
                archive.writestr("v", b"")
            with pytest.raises(ValueError, match="cannot be read"):
                load_tensors(path)

    def test_arrays_that_do_not_fit_in_memory(self, tmp_path):
        path = tmp_path / "t.npz"
        description = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}\n"
        header = b"\x93NUMPY\x01\x00" + len(description).to_bytes(2, "little") + description
        with zipfile.ZipFile(path, "w") as archive:
            for member in ("q.npy", "k.npy", "v.npy"):
                archive.writestr(member, header)
        with pytest.raises(ValueError, match="cannot be read"):
            load_tensors(path)

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_damage_raises_nothing_but_a_value_error(self, tmp_path, save):
        path = tmp_path / "t.npz"
        save(path, **arrays(random_tensors(head_dim=8, value_dim=8), positions=None))
        whole = path.read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(200):
            damaged = bytearray(whole)
            for place in rng.integers(len(whole), size=3):
                damaged[place] = rng.integers(256)
            path.write_bytes(damaged[: rng.integers(len(whole) // 2, 2 * len(whole))])
            with suppress(ValueError):
                load_tensors(path)


class TestReport:
    def test_json_has_the_attributes_for_keys(self, rows):
        assert json.loads(to_json(rows)) == [asdict(row) for row in rows]

    def test_json_has_null_for_what_is_not_finite(self, rows):
        text = to_json([replace(rows[1], mean_kl=np.inf)])
        assert json.loads(text)[0]["mean_kl"] is None

    def test_the_table_is_not_cut(self, tensors, rows, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "40")
        print_table(make_table(rows, tensors))
        text = capsys.readouterr().out
        assert "…" not in text
        [line] = [line for line in text.splitlines() if " int4 " in line]
        for value in ("4.31", f"{rows[1].mean_kl:.3g}", f"{rows[1].output_cosine:.5f}"):
            assert value in line.split()

    @pytest.mark.parametrize(
        ("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xml")]
    )
    def test_plots(self, tensors, rows, tmp_path, suffix, start):
        path = tmp_path / f"quality.{suffix}"
        draw_plot(rows, tensors, path)
        assert path.read_bytes().startswith(start)

    def test_a_plot_names_its_points(self, tensors, rows, tmp_path):
        import matplotlib

        path = tmp_path / "quality.svg"
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw_plot(rows, tensors, path)
        text = path.read_text(encoding="utf-8")
        assert all(text.count(f">{row.name}<") == 2 for row in rows)

    def test_a_plot_of_nothing_above_zero(self, tensors, rows, tmp_path):
        draw_plot(
            [replace(rows[0], mean_kl=0.0, output_relative_error=0.0)], tensors, tmp_path / "p.png"
        )

    @pytest.mark.parametrize("path", ["quality", "quality.doc", "png"])
    def test_plots_of_other_kinds_are_refused(self, path):
        with pytest.raises(ValueError, match=r"^plot must be a file ending in \.pdf, \.png, \.svg"):
            check_plot(path)

    def test_matplotlib_is_asked_for(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ValueError, match=r'pip install "kvcodec-cpu\[plot\]"'):
            check_plot("quality.png")


class TestFiles:
    def test_checking_changes_nothing(self, tmp_path):
        check_writable(tmp_path / "new")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "old").write_bytes(b"old")
        check_writable(tmp_path / "old")
        assert (tmp_path / "old").read_bytes() == b"old"
        assert len(list(tmp_path.iterdir())) == 1

    def test_what_cannot_be_written(self, tmp_path):
        with pytest.raises(IsADirectoryError, match="it is a folder"):
            check_writable(tmp_path)
        with pytest.raises(FileNotFoundError, match="is no folder"):
            check_writable(tmp_path / "none" / "new")

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
    def test_read_only(self, tmp_path):
        (tmp_path / "old").touch(mode=0o444)
        with pytest.raises(PermissionError, match="it is read-only"):
            check_writable(tmp_path / "old")
        tmp_path.chmod(0o555)
        with pytest.raises(PermissionError, match="cannot be written"):
            check_writable(tmp_path / "new")
        tmp_path.chmod(0o755)

    def test_files_are_replaced_as_a_whole(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        write_file(path, b"old")
        path.chmod(0o640)
        write_file(path, b"new")
        assert path.read_bytes() == b"new"
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

        def fail(*_):
            raise OSError("no space")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write_file(path, b"newest")
        assert path.read_bytes() == b"new"
        assert len(list(tmp_path.iterdir())) == 1

    def test_links_are_followed(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "file")
        write_file(tmp_path / "link", b"content")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == b"content"

    def test_devices_are_written_to(self):
        check_writable(os.devnull)
        write_file(os.devnull, b"content")
        assert not os.path.isfile(os.devnull)
