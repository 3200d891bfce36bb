"""Padded samples: one document per sequence, and nothing learned from the padding."""

import numpy
import pytest
import torch

from autotune.data.batches import TokenSequences
from autotune.data.sources import Parts
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset
from autotune.predictor.predict import predict
from autotune.shipped.bpe import train_bpe
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_encoding import NO_TOKEN
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.training.trainer import Trainer

LENGTH = 8
SHORT, LONG = "abc", "abcdefghijkl"
HELD_OUT = ["x" * 20] * 4
SETTINGS = {
    "sequence_length": LENGTH,
    "global_batch": 2,
    "evaluation_sequences": 2,
    "packing": "padded",
}


@pytest.fixture
def sequences(tmp_path):
    """sequences(documents) returns the training samples made of them."""

    def make(documents, **settings):
        workload = make_workload("cpu", SETTINGS, settings)
        write_tokens(Parts(train=documents, held_out=HELD_OUT), workload, folder=tmp_path)
        return TokenSequences(tmp_path / "train.npy", sequence_length=LENGTH)

    return make


def test_a_document_is_a_sample_in_the_order_of_the_documents(sequences):
    tokens = sequences(["first...", "second..", "third..."]).batch(range(3)).tokens
    assert [bytes(row.tolist()) for row in tokens] == [b"first...", b"second..", b"third..."]


def test_a_short_document_is_filled_up_with_what_is_no_label(sequences):
    batch = sequences([SHORT] * 2).batch([0])
    assert batch.tokens.tolist() == [[*SHORT.encode(), *[0] * 5]]
    assert batch.labels.tolist() == [[*SHORT.encode()[1:], *[IGNORED_LABEL] * 6]]


def test_a_long_document_is_cut_where_the_sequence_ends(sequences):
    batch = sequences([LONG] * 2).batch([0])
    assert batch.tokens.tolist() == [[*LONG.encode()[:LENGTH]]]
    assert batch.labels.tolist() == [[*LONG.encode()[1:LENGTH], IGNORED_LABEL]]


def test_a_sample_begins_with_the_tokenizers_first_token_and_ends_in_its_padding(
    sequences, tmp_path
):
    train_bpe([b"any text"], vocab_size=300, file=tmp_path / "tokenizer.json")
    tokens = sequences([SHORT] * 2, tokenizer=str(tmp_path), vocab_size=300).batch([0]).tokens
    assert (tokens[0, 0].item(), tokens[0, 4:].tolist()) == (0, [1, 1, 1, 1])


def test_a_document_without_a_label_is_left_out(sequences):
    assert len(sequences(["a", SHORT, "b", LONG])) == 2


def test_too_few_documents_are_rejected_with_both_numbers(sequences):
    with pytest.raises(InvalidDataset, match="has 1 samples and 2 are needed") as raised:
        sequences([SHORT])
    assert "--packing packed" in raised.value.hint


# -- trained on ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded_request(tmp_path_factory):
    """padded_request(**choices) trains on documents of very different lengths."""
    from autotune.execution.process.preparation import prepare
    from autotune.execution.tasks import Prepare

    folder = tmp_path_factory.mktemp("padded")
    (folder / "data.jsonl").write_text(
        "\n".join(f'{{"text": "{"some words " * (number % 9 + 1)}"}}' for number in range(400))
    )
    sizes = {"layers": 1, "width": 16, "heads": 2, "steps": 12, "warmup_steps": 3}
    text = {"dataset": str(folder / "data.jsonl"), "packing": "padded", "evaluation_sequences": 5}
    workload = make_workload("cpu", {**sizes, **text, "sequence_length": 64, "global_batch": 4})
    prepare(Prepare(workload=workload, folder=folder / "prepared"))

    def make(**choices):
        return TrainingRequest(
            workload=workload,
            config=TrainingConfig(**{"micro_batch_size": 4, **choices}),
            folder=folder / "prepared",
            device="cpu",
            cap_bytes=2**40,
            requested_at=0.0,
        )

    return make


def test_the_loss_of_a_step_is_the_mean_over_the_labels_of_the_global_batch(padded_request):
    trainer = Trainer(padded_request())
    batch = next(trainer.batches())
    with torch.no_grad():
        total = trainer.step.forward(batch.tokens.contiguous(), batch.labels.contiguous()).item()
    assert trainer.step(0, batch) == pytest.approx(total / (batch.labels >= 0).sum().item())


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_micro_batches_with_more_and_less_padding_add_up_to_the_same_training(
    padded_request, micro_batch_size
):
    def losses(size):
        trainer = Trainer(padded_request(micro_batch_size=size))
        batches = trainer.batches()
        return [trainer.step(step, next(batches)) for step in range(4)]

    assert losses(micro_batch_size) == pytest.approx(losses(4), rel=1e-4)


def test_what_stands_in_the_padding_changes_no_loss(padded_request):
    first, second = Trainer(padded_request()), Trainer(padded_request())
    batch = next(first.batches())
    last_read = (batch.labels >= 0).sum(dim=1, keepdim=True)
    is_padding = torch.arange(batch.tokens.shape[1]) > last_read
    other = batch._replace(tokens=batch.tokens.masked_fill(is_padding, 65))
    assert not torch.equal(other.tokens, batch.tokens)
    assert first.step(0, other) == second.step(0, batch)


def test_perplexity_is_over_the_labels_of_the_held_out_samples(padded_request):
    request = padded_request()
    trainer = Trainer(request)
    measurement = trainer.run()
    rows = numpy.load(request.folder / "held_out.npy")[:5].astype(numpy.int64)
    tokens, labels = (
        torch.from_numpy(rows[:, :-1].clip(min=0)),
        torch.from_numpy(rows[:, 1:].copy()),
    )
    with torch.no_grad():
        total = trainer.step.forward(
            tokens.contiguous(), labels.masked_fill(labels < 0, IGNORED_LABEL)
        )
    assert measurement.perplexity == pytest.approx(
        (total / (labels >= 0).sum()).exp().item(), rel=1e-4
    )


def test_speed_counts_tokens_and_no_padding(padded_request):
    request = padded_request()
    rows = numpy.load(request.folder / "train.npy")[:, :-1]
    share = (rows == NO_TOKEN).mean()
    trainer = Trainer(request)
    measurement = trainer.run()
    places = 4 * 64
    [step] = trainer._timed_steps([1], trainer.batches())
    assert step.tokens == round(places * (1 - share))
    assert measurement.padding_share == pytest.approx(share)
    assert measurement.places_per_second == pytest.approx(
        measurement.tokens_per_second / (1 - share)
    )


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_batches_with_padding_take_as_much_memory_as_predicted(padded_request, micro_batch_size):
    request = padded_request(micro_batch_size=micro_batch_size)
    measured = Trainer(request).run().peak_memory_bytes
    predicted = predict(
        PredictionRequest(workload=request.workload, config=request.config, device="cpu")
    )
    assert measured == predicted.peak_memory_bytes
