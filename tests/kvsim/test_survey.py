"""Where the survey's formulas are wrong: its own figure beside the right one."""

import numpy as np
import pytest

import kvsim
from kvsim.layout import layer_layout
from kvsim.model import Attention, Layer
from kvsim.parts import parts

LLAMA_7B = kvsim.load_model("llama-7b")


def test_section_1_2_counts_one_layer_and_forgets_the_other_31():
    # the survey: 2 x 32 heads x 128 x 4 bytes = 32 KiB a token, "256 MB" for 8192 tokens
    published = 2 * 32 * 128 * 4
    assert published == 32 * 1024
    # right: times 32 layers, 1 MiB a token and 8 GiB in fp32, half of it in fp16
    assert LLAMA_7B.cache_bytes(1, bits=32) == 32 * published == 2**20
    assert LLAMA_7B.cache_bytes(8192, bits=32) == 8 * 2**30
    assert LLAMA_7B.cache_bytes(8192, bits=16) == 4 * 2**30
    assert LLAMA_7B.cache_bytes(8192, bits=32) == 32 * (8192 * published)


def test_section_3_2_2_metadata_is_a_scale_a_group_not_a_scale_an_element():
    # N = 128 values in G = 2 groups of E = 64, b = 4 bits, p = 16 bits, scale and minimum
    n, groups, each, bits, p = 128, 2, 64, 4, 16
    published = n * bits + groups * each * p  # N b + G E p
    right = n * bits + groups * 2 * p  # N b + G x parameters x p
    row = layer_layout(Layer(Attention("full", 1, 1, 128, 128)), kvsim.parse_method("int(bits=4,group=64)"), 1, 0, 16)
    held = 8 * sum(b.bytes for b in row.sides[0].buffers)
    assert held == right == 576
    assert published == 2560 > n * 16  # the published size exceeds the uncompressed 2048 bits
    # and "original size N b" is N times the original bits: the ratio is 2048 / 576
    assert n * 16 / held == pytest.approx(3.556, abs=1e-3)


def test_section_1_1_a_step_is_linear_but_the_generation_stays_quadratic():
    device, method = kvsim.load_device("h100-sxm"), kvsim.Method()

    def step_flops(tokens):
        record = kvsim.predict(kvsim.Case(LLAMA_7B, device, method, kvsim.Workload(1, tokens)))
        return next(line.flops for line in record.decode.lines if line.name == "attention")

    assert step_flops(2048) == pytest.approx(2 * step_flops(1024))
    tokens = np.arange(1, 2049)
    each = kvsim.predict(kvsim.Case(LLAMA_7B, device, method, kvsim.Workload(1, tokens))).decode.lines
    flops = next(line.flops for line in each if line.name == "attention")
    assert flops.sum() / flops[:1024].sum() == pytest.approx(4, rel=2e-3)


def test_section_3_5_the_compression_ratio_has_scales_and_zeros():
    # published: original_bits / quantized_bits = 2; with fp16 scale and minimum per 64 values it is 16 / 8.5
    record = kvsim.predict(
        kvsim.Case(
            LLAMA_7B, kvsim.load_device("h100-sxm"), kvsim.parse_method("int(bits=8,group=64)"), kvsim.Workload(1, 100)
        )
    )
    assert record.compression == pytest.approx(16 / 8.5)
    assert record.compression < 16 / 8


def test_sections_name_their_sources_rightly():
    assert "2306.14048" in parts()["h2o"].source  # not 2310.04625
    assert "2503.01586" in parts()["elitekv"].source


def test_every_method_of_the_survey_has_a_part():
    named = {section for part in parts().values() for section in part.survey.replace(" ", "").split(",")}
    for section in (
        "3.1.1",
        "3.1.2",
        "3.2",
        "3.3.1",
        "4.1.1",
        "4.1.2",
        "4.3",
        "4.4",
        "5.2",
        "5.2.1",
        "5.3.1",
        "5.3.2",
        "5.4",
        "5.5",
    ):
        assert section in named, section
