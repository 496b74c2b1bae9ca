"""The quickstart's corpus, and the check of its runs."""

import pytest
from quickstart import check


@pytest.fixture
def logs(tmp_path):
    def write(losses_of_each):
        paths = []
        for number, losses in enumerate(losses_of_each):
            paths.append(str(tmp_path / f"{number}.log"))
            lines = [f"iteration {i}/4 | loss {loss:.6f} | learning rate 1 | x\n" for i, loss in losses.items()]
            (tmp_path / f"{number}.log").write_text("noise\n" + "".join(lines))
        return paths

    return write


@pytest.mark.parametrize(
    "first_half, resumed, status",
    [
        ({1: 19.0, 2: 8.0}, {3: 7.0, 4: 6.0}, 0),
        ({1: 19.0, 2: 8.0}, {3: 7.0, 4: 6.000001}, 1),
        ({1: 19.0, 2: 8.0}, {4: 6.0}, 1),
        ({1: 19.0, 2: 8.0, 3: 7.0}, {3: 7.0, 4: 6.0}, 1),
    ],
)
def test_the_quickstart_notices_a_resume_that_differs(logs, first_half, resumed, status):
    assert check.main(*logs([{1: 19.0, 2: 8.0, 3: 7.0, 4: 6.0}, first_half, resumed])) == status


def test_the_quickstart_notices_a_loss_that_does_not_fall(logs):
    assert check.main(*logs([{1: 9.0, 2: 7.5}, {1: 9.0}, {2: 7.5}])) == 1


def test_the_quickstart_s_corpus_is_this_python_s_source():
    pytest.importorskip("tokenizers")
    from quickstart.data import source_files

    files = list(source_files())
    assert len(files) > 1000 and len(set(files)) == len(files)
    assert any(path.endswith("json/decoder.py") for _, path in files)
