import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.train.logs import RunLog, read_metrics


def test_a_resumed_log_goes_on_from_its_step_and_forgets_what_came_after(tmp_path) -> None:
    log = RunLog(tmp_path, is_main=True)
    for step in range(1, 6):
        log.write("train", step, {"loss": 1.0 / step})
    log.write("evaluation", 2, {"alpha": 0.4, "note": "text"})
    log.write("evaluation", 5, {"alpha": 0.5})
    log.flush()  # and then a kill: nothing is closed
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # a kill in the middle of a line

    log = RunLog(tmp_path, is_main=True, resumed_step=3)
    assert log.last_evaluation == 2
    log.write("train", 4, {"loss": 9.0})
    log.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == read_metrics(tmp_path / "metrics.jsonl")
    train = [(record["step"], record["loss"]) for record in lines if record["kind"] == "train"]
    assert train == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("train/loss")}.keys() == {1, 2, 3, 4}
    assert events.Scalars("train/loss")[-1].value == 9.0
    assert events.Scalars("evaluation/alpha")[0].step == 2


def test_a_run_that_starts_anew_starts_an_empty_log_and_other_ranks_write_nothing(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1}\n')
    log = RunLog(tmp_path, is_main=True)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    other = RunLog(tmp_path / "other", is_main=False)
    other.write("train", 1, {"loss": 1.0})
    other.close()
    assert not (tmp_path / "other").exists()
