"""Plan quality on the reference workload, and the command that shows it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import struct
from fractions import Fraction

import pytest

from viking import _engine, plan, shapes, timeline
from viking.shapes import Machine, Trace, Use, Weight

GB, GIB = 10**9, 2**30

# name: link bytes/s, sustained FLOP/s and memory bytes/s.
MACHINES = {
    "H200": (55 * GB, Machine(600e12, 3.87e12)),
    "RTX 4090": (25 * GB, Machine(150e12, 0.9e12)),
}


def quality(
    machine: str, weights: str, budget: int, depth: Fraction | int = 1, early_stop: bool = False
) -> plan.Report:
    """Plan the reference workload and print its line of the table."""
    link, rates = MACHINES[machine]
    trace = shapes.get("flux2", depth).trace(weights=weights, rank=16, machine=rates, early_stop=early_stop)
    report = plan.report(trace, budget, link)
    print(
        f"{machine:9} {weights:14} {'' if depth == 1 else depth!s:4} B {budget / GB:5.2f} GB: "
        f"{report.fetched_bytes / GB:6.2f} GB = {report.bytes_ratio:.4f} x least, "
        f"{report.step_ns / 1e6:7.1f} ms = {report.time_ratio:.4f} x T1, "
        f"residents {report.resident_bytes / GB:5.2f} GB, "
        f"ring {report.ring_bytes / GB:4.2f} GB, planned in {report.planning_seconds * 1e3:.0f} ms"
    )
    return report


# ---- quality ----


@pytest.mark.parametrize("early_stop", [False, True], ids=["whole", "early stop"])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("weights", "gigabytes"),
    [*itertools.product(["float8_e4m3fn"], [5, 8, 12, 16, 20]), *itertools.product(["bfloat16"], range(6, 21))],
)
def test_a_full_flux2_step_costs_little_more_than_it_must(machine, weights, gigabytes, early_stop):
    report = quality(machine, weights, gigabytes * GB, early_stop=early_stop)
    assert report.bytes_ratio <= 1.02
    assert report.time_ratio <= 1.03
    assert report.slab_bytes <= gigabytes * GB


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("gibibytes", [3, 4, 8])
def test_a_quarter_of_flux2_costs_little_more_than_it_must(machine, gibibytes):
    report = quality(machine, "bfloat16", gibibytes * GIB, Fraction(1, 4))
    assert report.time_ratio <= 1.08
    assert report.slab_bytes <= gibibytes * GIB


def test_most_of_a_budget_is_residents_so_that_less_must_be_pinned():
    report = quality("H200", "float8_e4m3fn", 20 * GB)
    assert report.resident_bytes > 0.8 * 20 * GB
    assert report.pinned_bytes == report.trace.total_bytes - report.resident_bytes


def test_what_fits_is_never_fetched():
    trace = shapes.get("flux2", Fraction(1, 8)).trace()
    report = plan.report(trace, trace.total_bytes)
    assert (report.fetched_bytes, report.stall_ns, report.pinned_bytes) == (0, 0, 0)
    assert report.step_ns == report.floor_ns == report.compute_ns
    assert report.bytes_ratio == report.time_ratio == 1.0


def test_a_plan_is_the_same_every_time():
    trace = shapes.get("flux2", Fraction(1, 4)).trace()
    first, second = (dataclasses.replace(plan.report(trace, 4 * GB), planning_seconds=0.0) for _ in range(2))
    assert first == second


def test_the_smallest_budget_works_and_one_byte_less_names_it():
    trace = shapes.get("flux2", Fraction(1, 4)).trace()
    smallest = plan.report(trace, trace.total_bytes).smallest_budget_bytes
    assert plan.report(trace, smallest).slab_bytes == smallest
    with pytest.raises(ValueError, match=f"the smallest budget that works is {smallest} bytes"):
        plan.report(trace, smallest - 1)


# ---- shapes ----


def test_flux2_has_the_published_numbers():
    shape = shapes.get("flux2")
    assert len(shape.layers) == 160
    assert shape.lora_parameters(1) == 6_094_848
    assert round(shape.parameters / 1e9, 1) == 31.4
    trace = shape.trace(weights="bfloat16")
    assert round(trace.total_bytes / 1e9, 1) == 62.8
    assert [trace.uses[index].phase for index in trace.sweeps] == ["F", "R"]


def test_a_step_walks_forwards_then_recomputes_and_goes_back_block_by_block():
    shape = shapes.get("flux2", Fraction(1, 48))  # one block of each kind
    phases = "".join(phase for _, phase, _ in shape.order())
    assert phases == "F" * 10 + "RRBB" + "R" * 8 + "B" * 8
    layers = [layer for layer, _, _ in shape.order()]
    assert layers == [*range(10), 8, 9, 9, 8, *range(8), *reversed(range(8))]
    assert [layer for layer, _, _ in shape.order("plain")] == [*range(10), *reversed(range(10))]
    assert [layer for layer, _, _ in shape.order("forward")] == [*range(10)]
    stopped = [layer for layer, phase, _ in shape.order(early_stop=True) if phase == "R"]
    assert stopped == [8, *range(7)]


def test_compute_times_follow_the_formula():
    shape = shapes.get("flux2", Fraction(1, 48))
    machine = Machine(1e12, 1e12)
    first = shape.trace(weights="int8", rank=8, machine=machine).uses[0]
    layer = shape.layers[0]
    flops = 2 * 1024 * layer.parameters + 2 * 1024 * 8 * (6144 + 18432) + 4 * 1536**2 * 6144
    assert first.compute_ns == round((flops / 1e12 + 3 * layer.parameters / 1e12) * 1e9)
    last = shape.trace(weights="bfloat16", rank=8, machine=machine).uses[-1]
    flops = 2 * 1024 * layer.parameters + 4 * 1024 * 8 * (6144 + 18432) + 2.5 * 4 * 1536**2 * 6144
    assert (last.weight, last.phase, last.compute_ns) == (0, "B", round(flops / 1e12 * 1e9))


def test_sweeps_are_found_where_every_weight_has_been_used_again():
    def sweeps(order: str) -> tuple[int, ...]:
        uses = tuple(Use("abc".index(each), 2 * at, 2 * at + 1, 1) for at, each in enumerate(order))
        return Trace("", tuple(Weight(each, 256) for each in "abc"), uses).find_sweeps()

    assert sweeps("abccba") == (0, 3)
    assert sweeps("abcccbba") == (0, 3)
    assert sweeps("abc") == (0,)
    assert sweeps("abcab") == (0,)
    assert sweeps("abccbaab") == (0, 3)
    assert sweeps("aa") == (0, 1)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: shapes.get("flux3"), "'flux3' is unknown; there are flux1, flux2, sdxl, wan14b"),
        (lambda: shapes.get("flux2", 0), "depth: 0 is not above 0"),
        (lambda: shapes.get("flux2", 2), "depth: 2 is not above 0 and at most 1"),
        (lambda: shapes.get("flux2").trace("backwards"), "'backwards' is unknown; accepted are checkpointed"),
        (lambda: shapes.get("flux2").trace(weights="int3"), "'int3' is unknown"),
        (lambda: shapes.get("flux2").trace(rank=-1), "rank: -1 is negative"),
    ],
)
def test_a_shape_that_is_not_there_is_refused(call, complaint):
    with pytest.raises(ValueError) as caught:
        call()
    assert complaint in str(caught.value)


# ---- the engine's function ----


def zigzag(count: int) -> list[tuple[int, int, int, int, int]]:
    order = [*range(count), *reversed(range(count))]
    return [(weight, 2 * at, 2 * at + 1, 0, 1000) for at, weight in enumerate(order)]


def test_the_engine_returns_addresses_fetches_and_spans_that_agree():
    planned = _engine.plan([512] * 10, zigzag(10), 2560, 10**9, latency_ns=0)
    assert planned["slab_bytes"] == planned["ring_bytes"] + planned["resident_bytes"] <= 2560
    assert planned["fetched_bytes"] == 512 * len(planned["fetches"])
    assert planned["period_ns"] == planned["compute_ns"] + planned["stall_ns"]
    assert planned["link_ns"] == sum(end - begin for begin, end, _, _ in planned["copies"])
    assert [(begin, weight) for begin, _, weight, _ in planned["computes"]] == sorted(
        (begin, weight) for begin, _, weight, _ in planned["computes"]
    )
    uses = zigzag(10)
    for weight, need, after in planned["fetches"]:
        assert uses[need][0] == weight
        assert -len(uses) <= after < need
        assert not planned["resident"][weight]


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        (([256, 100], [], 512, 1), ValueError, "weight 1 has 100 bytes"),
        (([256], [(0, 0, 1, 0)], 512, 1), ValueError, "a use is (weight, begin, end, kind, compute_ns)"),
        (([256], [(0, 0, 1, 0, -1)], 512, 1), ValueError, "compute_ns: -1 is not from 0"),
        (([256], [(0, 0, 1, 7, 1)], 512, 1), ValueError, "kind: 7 is not from 0 to 2"),
        (([256], [(1, 0, 1, 0, 1)], 512, 1), ValueError, "use 0 is of weight 1"),
        (([256], [(0, 1, 1, 0, 1)], 512, 1), ValueError, "use 0 of weight 0"),
        (([256], [], -1, 1), ValueError, "budget_bytes: -1 is not from 0"),
        (([256], [], 2**70, 1), ValueError, "budget_bytes"),
        (([256], [], 512, 0), ValueError, "0 bytes per second"),
        (([256], [], 512, 1, 8000, []), ValueError, "compute_scales: give at least one"),
        (([256], [], 512, 1, 8000, [1.0] * 9), ValueError, "compute_scales: 9 are given"),
        (([256], [], 512, 1, 8000, [float("nan")]), ValueError, "compute_scales: nan"),
        (([256], [], 512, 1, 8000, ["1"]), TypeError, ""),
        ((["256"], [], 512, 1), TypeError, ""),
        (([256], 5, 512, 1), TypeError, ""),
        (([256],), TypeError, ""),
        (([256], [(0, 0, 1, 1, 1)], 512, 1), RuntimeError, "use 0 changes weight 0"),
    ],
)
def test_the_engine_refuses_what_it_cannot_plan(arguments, error, complaint):
    with pytest.raises(error) as caught:
        _engine.plan(*arguments)
    assert complaint in str(caught.value)


# ---- files ----


def test_a_saved_trace_loads_as_it_was(tmp_path):
    trace = shapes.get("flux2", Fraction(1, 8)).trace("plain", weights="int8")
    plan.save(tmp_path / "step.json", trace)
    assert plan.load(tmp_path / "step.json") == trace


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[]", "is no trace of Viking"),
        ('{"format": "viking-trace", "version": 9}', "has version 9"),
        ('{"format": "viking-trace", "version": 1, "weights": []}', "is damaged: 'uses'"),
        ('{"format": "viking-trace", "version": 1, "weights": [], "uses": [[0, 0, 1, 0, 1, ""]]}', "not listed"),
        (
            '{"format": "viking-trace", "version": 1, "weights": [{"name": "a", "bytes": 1.5}], "uses": []}',
            "1.5 is not a whole number",
        ),
        ('{"format": "viking-trace", "version": 1, "weights": [5], "uses": []}', "is damaged"),
        ('{"format": "viking-trace", "version": 1, "weights": [], "uses": [[0]]}', "is damaged"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, complaint):
    path = tmp_path / "step.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        plan.load(path)
    assert complaint in str(caught.value)


# ---- the command ----


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = plan.main(list(arguments))
    except SystemExit as stopped:  # argparse's own refusals
        code = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_tells_a_person_what_a_step_costs(capsys):
    code, out, err = run(capsys, "flux2", "--weights", "float8_e4m3fn", "--weights-budget", "16GB")
    assert (code, err) == (0, "")
    assert "160 weights, 31.4 GB, 480 uses a step" in out
    assert "x the least possible (30.8 GB)" in out
    assert "x T1 (" in out
    assert "16.0 GB: " in out
    assert "pinned for what travels" in out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith(("compute", "link ")))
    assert set(rows["compute"]) >= set("FRB.")
    assert len(rows["compute"]) == 100
    assert rows["link"].count("#") > 30
    assert "block 0-6 " in out


def test_where_everything_fits_the_command_says_so(capsys):
    code, out, _ = run(capsys, "flux2", "--depth", "1/8", "--weights-budget", "100GB")
    assert code == 0
    assert "nothing has to travel" in out
    assert "7.85 GB: everything is resident" in out
    assert "1.000 x T1" in out


def test_without_a_budget_half_of_the_weights_fit_and_it_says_so(capsys):
    _, out, _ = run(capsys, "flux2", "--depth", "1/8", "--mode", "plain", "--json")
    data = json.loads(out)
    assert data["budget_bytes"] == data["total_bytes"] // 2
    assert data["assumptions"][-1] == "half of the weights fit; --weights-budget or --vram says what does"


def test_the_timeline_as_text_is_what_happens():
    """Two weights share an address, a third is resident: fetch a, use a, use c while b travels, use b, go back."""
    weights = [
        timeline.Placed("a", 0, 100, False, block=0),
        timeline.Placed("b", 0, 100, False, block=1),
        timeline.Placed("c", 100, 100, True, block=1),
    ]
    copies = [timeline.Span(0, 10, 0), timeline.Span(20, 40, 1)]
    computes = [
        timeline.Span(10, 20, 0, "F"),
        timeline.Span(20, 30, 2, "F"),
        timeline.Span(40, 60, 1, "R"),
        timeline.Span(60, 100, 1, "B"),
    ]
    lines = timeline.text(weights, computes, copies, 100, columns=20).splitlines()
    assert lines[1:5] == [
        "compute     ..FFFF..RRRRBBBBBBBB",
        "link        ##  ####",
        "block 0       ##",
        "block 1     --------############",
    ]
    assert lines[0].startswith("            0")
    assert lines[0].endswith("0.0 ms")
    assert timeline.text(weights, [], [], 0) == "nothing takes any time"


def test_json_carries_the_whole_plan(capsys):
    arguments = ("flux2", "--depth", "1/4", "--weights-budget", "4GiB", "--link", "25GB/s", "--tflops", "150")
    code, out, _ = run(capsys, *arguments, "--hbm", "0.9TB/s", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["budget_bytes"] == 4 * GIB
    assert data["link_bytes_per_second"] == 25 * GB
    assert data["bytes_ratio"] == data["fetched_bytes"] / data["bound_bytes"]
    assert 1.0 <= data["time_ratio"] <= 1.08
    assert len(data["weights"]) == 40
    assert len(data["computes"]) == data["uses"] == 120
    assert data["copies"][0].keys() == {"begin_ns", "end_ns", "weight", "phase"}
    assert data["slab_bytes"] <= 4 * GIB
    assert data["assumptions"] == ["a link of 25.0 GB/s", "150 TFLOP/s sustained"]


def test_vram_leaves_room_for_all_but_weights_and_says_so(capsys):
    code, out, _ = run(capsys, "flux2", "--weights", "int8", "--vram", "24GiB", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["budget_bytes"] == 24 * GIB - 3_600_000_000
    assert "3.60 GB of 24GiB for all but weights" in data["assumptions"][-1]


def test_a_recorded_trace_is_planned_like_a_shape(capsys, tmp_path):
    trace = shapes.get("flux2", Fraction(1, 4)).trace()
    plan.save(tmp_path / "step.json", trace)
    _, of_shape, _ = run(capsys, "flux2", "--depth", "1/4", "--weights-budget", "4GB", "--json")
    code, of_file, _ = run(capsys, str(tmp_path / "step.json"), "--weights-budget", "4GB", "--json")
    assert code == 0
    apart = {"assumptions": None, "planning_seconds": None}
    assert json.loads(of_file) | apart == json.loads(of_shape) | apart


def test_a_budget_of_zero_is_the_smallest_that_works(capsys):
    _, out, _ = run(capsys, "flux2", "--depth", "1/4", "--weights-budget", "0", "--json")
    data = json.loads(out)
    assert data["budget_bytes"] == data["smallest_budget_bytes"] == data["slab_bytes"] > 0


def test_a_picture_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    code, out, err = run(capsys, "flux2", "--depth", "1/4", "--weights-budget", "4GiB", "--png", str(path))
    assert (code, err) == (0, "")
    assert out.rstrip().endswith(f"{path} shows the same step")
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    assert width > 1000
    assert height > 700


def test_a_picture_has_a_panel_for_each_question():
    pytest.importorskip("matplotlib")
    report = plan.report(shapes.get("flux2", Fraction(1, 4)).trace(), 4 * GIB)
    figure = timeline.figure(report.placed, report.computes, report.copies, report.step_ns, title="a step")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(":")[0] for title in titles if title] == [
        "in the slab, residents",
        "in the slab, ring",
        "on the link",
        "what computes",
    ]
    assert figure.axes[3].get_xlabel() == "ms of one step"
    assert figure.axes[3].get_xlim() == (0, report.step_ns / 1e6)


def test_stays_end_where_their_bytes_are_overwritten():
    weights = [
        timeline.Placed("a", 0, 100, False),
        timeline.Placed("b", 50, 100, False),
        timeline.Placed("c", 200, 9, False),
    ]
    copies = [timeline.Span(10, 20, 0), timeline.Span(60, 70, 1)]
    assert timeline.stays(weights, copies, 100) == [
        (2, -100, -100, 100),  # never overwritten
        (1, -40, -30, 10),  # left by the step before
        (0, 10, 20, 60),
        (1, 60, 70, 100),
    ]
    assert timeline.stays(weights, copies, 100, periodic=False) == [(0, 10, 20, 60), (1, 60, 70, 100)]


def test_without_matplotlib_one_sentence_names_the_extra(capsys, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    path = tmp_path / "step.png"
    code, out, err = run(capsys, "flux2", "--depth", "1/4", "--png", str(path))
    assert (code, out) == (1, "")
    assert "pip install 'viking-engine[demo]'" in err
    assert not path.exists()


def test_a_picture_that_cannot_be_written_is_one_sentence(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("nowhere/step.png", "step.docx"):
        code, out, err = run(capsys, "flux2", "--depth", "1/8", "--png", str(tmp_path / name))
        assert (code, out) == (1, "")
        assert err.startswith("viking.plan: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["flux9"], "'flux9' is neither a shape (flux1, flux2, sdxl, wan14b) nor a file"),
        (["flux2", "--weights-budget", "12 apples"], "--weights-budget: '12 apples' has the unknown unit 'apples'"),
        (["flux2", "--weights-budget", "-1GB"], "--weights-budget"),
        (["flux2", "--weights-budget", "1GB"], "the smallest budget that works is 1358954496 bytes"),
        (["flux2", "--vram", "3GB"], "--vram: of 3GB, all but weights takes 3.60 GB already"),
        (["flux2", "--vram", "24GiB", "--weights-budget", "3GB"], "not allowed with argument"),
        (["flux2", "--link", "0"], "--link: '0' is zero"),
        (["flux2", "--link", "fast"], "--link: 'fast' cannot be read"),
        (["flux2", "--depth", "1/0"], "--depth: '1/0' cannot be read"),
        (["flux2", "--depth", "3"], "depth: 3 is not above 0"),
        (["flux2", "--tflops", "0"], "--tflops: 0 is not above 0"),
        (["flux2", "--tflops", "nan"], "--tflops: nan"),
        (["flux2", "--hbm", ""], "--hbm: '' is empty"),
        (["flux2", "--rank", "-1"], "rank: -1 is negative"),
        (["flux2", "--rank", "many"], "invalid int value"),
        (["flux2", "--weights", "int3"], "invalid choice"),
        ([], "required"),
    ],
)
def test_arguments_that_make_no_sense_are_one_sentence_and_exit_code_2(capsys, arguments, complaint):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert "Traceback" not in err


def test_options_of_shapes_are_refused_for_files(capsys, tmp_path):
    plan.save(tmp_path / "step.json", shapes.get("flux2", Fraction(1, 8)).trace())
    code, _, err = run(capsys, str(tmp_path / "step.json"), "--rank", "4")
    assert code == 2
    assert "--rank is for shapes" in err
