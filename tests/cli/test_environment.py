"""The platform is settled only where the user has not chosen and no accelerator is in sight."""

import os

import pytest

from equarx_serve.cli import environment


@pytest.fixture
def variables(monkeypatch):
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def see(monkeypatch, tpu, gpu):
    monkeypatch.setattr(environment, "tpu_in_sight", lambda: tpu)
    monkeypatch.setattr(environment, "gpu_in_sight", lambda: gpu)


def test_without_accelerator_the_cpu_is_chosen_and_the_metadata_query_skipped(variables):
    see(variables, tpu=False, gpu=False)
    environment.settle_platform()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_a_users_choice_stands(variables):
    variables.setenv("JAX_PLATFORMS", "tpu,cpu")
    see(variables, tpu=False, gpu=False)
    environment.settle_platform()
    assert os.environ["JAX_PLATFORMS"] == "tpu,cpu"


@pytest.mark.parametrize(("tpu", "gpu"), [(True, False), (False, True)])
def test_where_an_accelerator_is_jax_chooses(variables, tpu, gpu):
    see(variables, tpu, gpu)
    environment.settle_platform()
    assert "JAX_PLATFORMS" not in os.environ
    assert ("TPU_SKIP_MDS_QUERY" in os.environ) is not tpu


def test_devices_are_seen_by_their_files(tmp_path):
    assert not environment.tpu_in_sight(tmp_path)
    assert not environment.gpu_in_sight(tmp_path)
    (tmp_path / "accel0").touch()
    (tmp_path / "nvidia0").touch()
    assert environment.tpu_in_sight(tmp_path)
    assert environment.gpu_in_sight(tmp_path)
    (tmp_path / "accel0").unlink()
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not environment.tpu_in_sight(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    assert environment.tpu_in_sight(tmp_path)


def test_the_context_limit_is_the_models():
    from equarx_serve.cli.prefill import MAX_CONTEXT
    from equarx_serve.gemma3 import MAX_CONTEXT as of_the_model

    assert of_the_model == MAX_CONTEXT
