from agentfly.roles.steps import read_steps


def test_a_run_without_a_file_has_no_steps(tmp_path):
    assert read_steps(tmp_path / "metrics.jsonl") == []


def test_the_last_record_of_a_step_counts_and_half_a_line_does_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 1}\n{"step": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a"')
    assert read_steps(path) == [{"step": 1}, {"step": 2, "a": 2}]
