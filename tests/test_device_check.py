"""The check of devices, on simulated chips: what it reads of a compiled program, and its parts."""

from pathlib import Path

import pytest

from tests.hlo import floats_of_sizes

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "device_check"

# --- Compiled programs

HLO = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(s8[64,32]{1,0})->f32[1,64]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: s8[64,32]) -> f32[64] {
  %inside = f32[64,32]{1,0} convert(%p)
  ROOT %reduce.1 = f32[64]{0} reduce(%inside, %zero), dimensions={1}, to_apply=%add
}

%body.2 (arg: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %arg = (s32[], /*index=1*/f32[64,32]{1,0}) parameter(0)
  %held = f32[64,32]{1,0} get-tuple-element(%arg), index=1
  %in_loop = bf16[2,32,32]{2,1,0:T(8,128)(2,1)S(1)} fusion(%held), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[64,32]{1,0}) tuple(%i, %held)
}

%cond.2 (arg: (s32[], f32[64,32])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%yes (x: f32[32]) -> f32[32] {
  %in_branch = (f32[32,64]{1,0}, s8[4096]{0}) custom-call(%x), custom_call_target="gemm"
}

%no (x: f32[32]) -> f32[32] {
  ROOT %same = f32[32]{0} copy(%x)
}

%parallel (p: s8[64,32]) -> f32[64,32] {
  ROOT %in_call = f32[64,32]{1,0} convert(%p)
}

ENTRY %main.3 (w: s8[64,32], x: f32[64,32]) -> f32[1,64] {
  %w = s8[64,32]{1,0} parameter(0)
  %x = f32[64,32]{1,0} parameter(1)
  %small = f32[64]{0} fusion(%w), kind=kInput, calls=%fused
  %offender.7 = f32[64,32]{1,0} convert(%w)
  %bits = s32[64,32]{1,0} convert(%w)
  %flat = f32[2048]{0} bitcast(%offender.7)
  %loop = (s32[], f32[64,32]{1,0}) while(%init), condition=%cond.2, body=%body.2
  %either = f32[32]{0} conditional(%p, %x, %x), branch_computations={%yes, %no}
  %called = f32[64,32]{1,0} call(%w), to_apply=%parallel
  ROOT %out = f32[1,64]{1,0} reshape(%small)
}
"""


def test_floats_as_large_as_a_weight_are_found_wherever_they_are_left_in_memory():
    found = floats_of_sizes(HLO, {64 * 32})
    assert [(f.computation, f.name, f.type) for f in found] == [
        ("main.3", "offender.7", "f32[64,32]"),
        ("cond.2", "", "")[:0] or ("body.2", "in_loop", "bf16[2,32,32]"),
        ("yes", "in_branch", "f32[32,64]"),
        ("parallel", "in_call", "f32[64,32]"),
    ]
    assert [f.nbytes for f in found] == [8192, 4096, 8192, 8192]


def test_floats_of_another_size_are_none_of_its_business():
    assert floats_of_sizes(HLO, {64 * 32 + 1}) == []


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        floats_of_sizes("HloModule empty\n", {1})
