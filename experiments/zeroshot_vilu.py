"""ViLU in the zero-shot table: a head on the locked dual encoder that predicts failures."""

from __future__ import annotations

import tables
import torch
from zeroshot_search import Search

from hydra_ensembles.baselines.member_stack import carry_uncertainty
from hydra_ensembles.baselines.small_head import fit_binary
from hydra_ensembles.baselines.vilu import FailureHead


def vilu(search: Search, *, zero_shot: bool) -> tables.Outputs:
    """Train ViLU's head and read its uncertainty on the test data.

    Args:
        search: Draw and world.
        zero_shot: Train on 400 images of the training classes that projections have not seen (as
            many by draw); else, nearer to the publication, on labelled images of the classes that
            are tested (first and second image of each).
    """
    world = search.world
    half, sets, embed = world.half, world.half.features.sets, world.projections.embed_images
    if zero_shot:
        generator = torch.Generator().manual_seed(search.number)
        rows = torch.randperm(500, generator=generator)[:400]
        images, labels = sets["validation"][half.classes[rows], 0], rows
        texts = world.projections.embed_texts(half.texts[half.classes])
    else:
        some = [sets[part][half.others, 0] for part in ("calibration", "validation")]
        images, labels = torch.cat(some), torch.arange(500).repeat(2)
        texts = world.unseen.text_embeddings
    seen = embed(images)
    predicted = (seen @ texts.t()).argmax(-1)
    wrong = predicted != labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(search.number)
        head = FailureHead(texts, hidden=256)
    fit_binary(
        head,
        [seen, predicted],
        wrong,
        positive_weight=float(torch.log1p((~wrong).sum() / wrong.sum())),
        steps=200,
        seed=search.number,
        progress=False,
    )
    head.texts = world.unseen.text_embeddings  # it attends to texts, whichever they are
    found = {}
    for name, features in world.tests(search.number).items():
        logits = world.read(features[:, 0])
        with torch.no_grad():
            unsure = head(embed(features[:, 0]), logits.argmax(-1))
        found[name] = carry_uncertainty(logits, unsure)[:, None]
    return world.packed(search.number, found, 1.0, ("msp", "energy"))
