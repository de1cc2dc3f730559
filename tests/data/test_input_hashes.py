"""One input has one hash, whatever it comes with."""

from __future__ import annotations

import torch

from hydra_ensembles.data.splits import input_hashes


def test_one_input_has_one_hash_whatever_it_comes_with() -> None:
    images = torch.randn(5, 3, 4, 4)
    hashes = input_hashes({"x": images})
    assert hashes is not None and hashes.dtype == torch.int64 and len(set(hashes.tolist())) == 5
    assert torch.equal(hashes[2:4], input_hashes({"pixel_values": images[2:4].double()}))
    changed = images.clone()
    changed[1, 0, 0, 0] = torch.nextafter(changed[1, 0, 0, 0], torch.tensor(9.0))
    assert (input_hashes({"x": changed}) == hashes).tolist() == [True, False, True, True, True]
    zeros = torch.zeros(1, 2)
    assert torch.equal(input_hashes({"x": zeros}), input_hashes({"x": -zeros}))
    assert not torch.equal(input_hashes({"x": zeros}), input_hashes({"x": torch.zeros(1, 2, 1)}))


def test_padding_on_either_side_does_not_count() -> None:
    short = input_hashes({"input_ids": torch.tensor([[4, 5]])})
    for ids, mask in ([4, 5, 0], [1, 1, 0]), ([0, 4, 5], [0, 1, 1]):
        batch = {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.tensor([mask]),
            "token_type_ids": torch.zeros(1, 3).long(),
        }
        assert torch.equal(input_hashes(batch), short)
    assert not torch.equal(input_hashes({"input_ids": torch.tensor([[4, 5, 0]])}), short)
    assert input_hashes({"texts": ["a"]}) is None
