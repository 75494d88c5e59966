"""Data sets: what their files must hold, what is said where they do not, and batches that can be resumed."""

import gzip
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import moonwalk as mw
from moonwalk import data
from moonwalk.lab.data import cifar, fashion
from moonwalk.lab.data.__main__ import main as prepare
from moonwalk.lab.data.signals import generate

# --- MNIST-1D ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signals():
    return data.mnist1d()


def test_mnist1d_is_the_packages(signals):
    """Numbers read off `mnist1d.data.make_dataset()`, version 0.0.2.post1."""
    assert signals.name == "MNIST-1D"
    assert signals.train_y[:12].tolist() == [2, 6, 4, 5, 6, 6, 6, 0, 3, 1, 6, 9]
    first = [-0.33200567, -0.47191037, -0.77869708, -1.00974083]
    last = [-0.51932871, -0.69872276, -1.28103769, -2.16101485]
    np.testing.assert_allclose(signals.train_x[0, :4, 0], first, rtol=1e-6)
    np.testing.assert_allclose(signals.test_x[-1, :4, 0], last, rtol=1e-6)
    x = np.concatenate([signals.train_x, signals.test_x]).astype(np.float64)
    np.testing.assert_allclose(x.mean(0)[:3, 0], [0.02994194, 0.01624727, 0.00500582], atol=1e-7)
    assert abs(x.mean()) < 1e-7 and abs(x.std() - 1) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, 7])
def test_mnist1d_is_the_packages_to_the_last_bit(seed):
    oracle = pytest.importorskip("mnist1d.data", exc_type=ImportError)
    args = oracle.get_dataset_args()
    args.seed = seed
    truth = oracle.make_dataset(args)
    x, y = generate(seed, 5000)
    np.testing.assert_array_equal(x, np.concatenate([truth["x"], truth["x_test"]]))
    np.testing.assert_array_equal(y, np.concatenate([truth["y"], truth["y_test"]]))


def test_mnist1d_refuses():
    with pytest.raises(mw.DataError, match="multiple of 10, got 25"):
        data.mnist1d(examples=25)
    with pytest.raises(mw.DataError, match="train_fraction must lie between 0 and 1, got 1.0"):
        data.mnist1d(train_fraction=1.0)
    assert data.mnist1d(seed=1, examples=20).name == "MNIST-1D (seed 1, 20 examples)"


# --- Fashion-MNIST ----------------------------------------------------------------------------------------

SIZES = {"train": 40, "test": 20}


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def fake_fashion(folder, zipped=True):
    random = np.random.RandomState(0)
    arrays = {
        "train_x": random.randint(0, 256, (40, 28, 28)).astype(np.uint8),
        "train_y": (np.arange(40) % 10).astype(np.uint8),
        "test_x": random.randint(0, 256, (20, 28, 28)).astype(np.uint8),
        "test_y": (np.arange(20) % 10).astype(np.uint8),
    }
    for key, name in fashion.FILES.items():
        raw = idx(arrays[key])
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / name).write_bytes(raw)
    return arrays


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(tmp_path, zipped):
    arrays = fake_fashion(tmp_path, zipped)
    found = fashion.read(tmp_path, SIZES)
    np.testing.assert_array_equal(found.train_x[..., 0], arrays["train_x"])
    np.testing.assert_array_equal(found.test_y, arrays["test_y"])
    assert found.in_shape == (28, 28, 1) and found.classes[9] == "Ankle boot"
    np.testing.assert_allclose(found.mean[0], arrays["train_x"].mean(), rtol=1e-12)
    np.testing.assert_allclose(found.std[0], arrays["train_x"].std(), rtol=1e-12)
    x = found.normalise(found.train_x)
    assert x.dtype == np.float32 and abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-5


def test_fashion_mnist_says_what_is_wrong(tmp_path):
    with pytest.raises(mw.DataError, match=r"no folder .*nowhere\. .*github.com/zalandoresearch"):
        data.fashion_mnist(tmp_path / "nowhere")
    with pytest.raises(mw.DataError, match="has neither train-images-idx3-ubyte nor"):
        data.fashion_mnist(tmp_path)
    fake_fashion(tmp_path)
    with pytest.raises(
        mw.DataError, match="should hold 60000 × 28 × 28 bytes, but its header says 40 × 28 × 28"
    ):
        data.fashion_mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(mw.DataError, match="train-images-idx3-ubyte.gz is not a whole gzip file"):
        fashion.read(tmp_path, SIZES)
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-5]))
    with pytest.raises(mw.DataError, match="should hold 31360 bytes after its header, but has 31355"):
        fashion.read(tmp_path, SIZES)
    images.write_bytes(gzip.compress(b"<html>"))
    with pytest.raises(mw.DataError, match="expected 00000803, found 3c68746d"):
        fashion.read(tmp_path, SIZES)
    images.write_bytes(whole)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(40, 10, np.uint8))))
    with pytest.raises(mw.DataError, match="labels of train_y must lie in 0 … 9, found 10"):
        fashion.read(tmp_path, SIZES)


# --- CIFAR-10 ---------------------------------------------------------------------------------------------


def cifar_arrays(per_batch=10):
    random = np.random.RandomState(1)
    return {
        name: (
            random.randint(0, 256, (per_batch, 32, 32, 3)).astype(np.uint8),
            (np.arange(per_batch) % 10).astype(np.int32),
        )
        for name in cifar.BATCHES
    }


def as_pickle(x, y):
    rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    content = {b"batch_label": b"one", b"labels": y.tolist(), b"data": np.ascontiguousarray(rows)}
    return pickle.dumps(content, protocol=2)  # the protocol of the official files


def as_binary(x, y):
    rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return np.concatenate([y[:, None].astype(np.uint8), rows], 1).tobytes()


def as_archive(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def official(kind):
    suffix, encode = (".bin", as_binary) if kind == "bin" else ("", as_pickle)
    files = {f"cifar-10-batches-{kind}/{n}{suffix}": encode(*a) for n, a in cifar_arrays().items()}
    return {f"cifar-10-batches-{kind}/batches.meta": b"names"} | files


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["py", "bin"])
def test_cifar10(tmp_path, kind, packed):
    if packed:
        name = {"py": "cifar-10-python.tar.gz", "bin": "cifar-10-binary.tar.gz"}[kind]
        as_archive(tmp_path / name, official(kind))
    else:
        for name, raw in official(kind).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(raw)
    found = cifar.read(tmp_path, 10, None)
    truth = cifar_arrays()
    np.testing.assert_array_equal(found.train_x, np.concatenate([truth[b][0] for b in cifar.TRAIN]))
    np.testing.assert_array_equal(found.test_x, truth["test_batch"][0])
    np.testing.assert_array_equal(found.test_y, truth["test_batch"][1])
    assert found.name == "CIFAR-10" and found.in_shape == (32, 32, 3)
    np.testing.assert_allclose(found.mean, found.train_x.mean((0, 1, 2)), rtol=1e-12)


def test_cifar10_says_what_is_wrong(tmp_path):
    with pytest.raises(
        mw.DataError, match=r"no file or folder .*nowhere\. .*cs.toronto.edu/~kriz/cifar.html"
    ):
        data.cifar10(tmp_path / "nowhere")
    with pytest.raises(mw.DataError, match="holds nothing that looks like CIFAR-10"):
        data.cifar10(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, arrays in cifar_arrays().items():
        (folder / name).write_bytes(as_pickle(*arrays))
    with pytest.raises(
        mw.DataError,
        match=r"'data' of .*data_batch_1 should be uint8\[10000, 3072\], but is uint8\[10, 3072\]",
    ):
        data.cifar10(tmp_path)
    raw = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(raw[:-100])
    with pytest.raises(mw.DataError, match="data_batch_2 is not a whole pickle"):
        cifar.read(tmp_path, 10, None)
    (folder / "data_batch_2").unlink()
    with pytest.raises(mw.DataError, match="has no data_batch_2; expected data_batch_1, "):
        cifar.read(tmp_path, 10, None)
    x, y = cifar_arrays()["data_batch_2"]
    (folder / "data_batch_2").write_bytes(as_pickle(x, y + 1))
    with pytest.raises(mw.DataError, match="data_batch_2 should lie in 0 … 9, found 1 … 10"):
        cifar.read(tmp_path, 10, None)
    with pytest.raises(
        mw.DataError, match=r"data_batch_1.bin should have 30730 bytes \(10 images\), but has 30720"
    ):
        cifar.from_binary(bytes(30720), "data_batch_1.bin", 10)
    archive = tmp_path / "cifar-10-python.tar.gz"
    as_archive(archive, official("py"))
    archive.write_bytes(archive.read_bytes()[:50_000])
    with pytest.raises(mw.DataError, match="is not a whole tar archive"):
        cifar.read(archive, 10, None)


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mw.DataError, match=r"asks for (posix|nt).system, .* nothing of it was run"):
        cifar.from_pickle(pickle.dumps({b"data": Harm()}), "data_batch_1", 10)
    assert not (tmp_path / "harmed").exists()
    with pytest.raises(mw.DataError, match="should be uint8.*but is NoneType"):
        cifar.from_pickle(pickle.dumps([1]), "data_batch_1", 10)
    with pytest.raises(mw.DataError, match="'labels' of data_batch_1 should be a list of 10 integers"):
        cifar.from_pickle(pickle.dumps({"data": np.zeros((10, 3072), np.uint8)}), "data_batch_1", 10)


# --- images -----------------------------------------------------------------------------------------------


def encoded(pixels, kind):
    Image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def image_files(kind="PNG", per_class=5):
    random = np.random.RandomState(2)
    files = {}
    for part, label, i in itertools.product(("train", "test"), cifar.CLASSES, range(per_class)):
        if part == "train" or i == 0:
            pixels = random.randint(0, 256, (32, 32, 3)).astype(np.uint8)
            files[f"{part}/{label}/{i:04d}.{kind.lower()}"] = encoded(pixels, kind), pixels
    return files


def test_cifar10_from_images(tmp_path):
    files = image_files()
    for name, (raw, _) in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    found = cifar.read(tmp_path, 10, tmp_path / "cache")
    assert found.name == "CIFAR-10 (PNG copy)"
    np.testing.assert_array_equal(found.train_x[7], files["train/automobile/0002.png"][1])
    assert found.train_y[7] == 1 and found.test_y.tolist() == list(range(10))
    (cached,) = (tmp_path / "cache").iterdir()
    written = cached.stat().st_mtime_ns
    assert cifar.read(tmp_path, 10, tmp_path / "cache").digest() == found.digest()
    assert cached.stat().st_mtime_ns == written
    (tmp_path / "train/cat/0000.png").write_bytes(files["train/dog/0001.png"][0])
    assert cifar.read(tmp_path, 10, tmp_path / "cache").digest() != found.digest()


def test_cifar10_from_an_archive_of_jpegs(tmp_path):
    files = image_files("JPEG")
    as_archive(tmp_path / "copy.tar.xz", {f"copy/{n}": raw for n, (raw, _) in files.items()}, "w:xz")
    found = cifar.read(tmp_path / "copy.tar.xz", 10, None)
    assert found.name == "CIFAR-10 (JPEG copy)"
    with pytest.raises(
        mw.DataError, match=r"training images \(50000, 32, 32, 3\), but has \(50, 32, 32, 3\)"
    ):
        data.cifar10(tmp_path / "copy.tar.xz")


def test_image_folders_say_what_is_wrong(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    square = np.zeros((8, 8, 3), np.uint8)
    (tmp_path / "train/cat/a.png").write_bytes(encoded(square, "PNG"))
    with pytest.raises(mw.DataError, match="has no images in test/<class>/"):
        data.image_folder(tmp_path, "cats")
    (tmp_path / "test" / "dog").mkdir(parents=True)
    (tmp_path / "test/dog/a.png").write_bytes(encoded(square, "PNG"))
    with pytest.raises(mw.DataError, match="has test/dog, but no train/dog"):
        data.image_folder(tmp_path, "cats")
    (tmp_path / "test/dog/a.png").write_bytes(encoded(square[:4], "PNG"))
    with pytest.raises(
        mw.DataError, match="must have one size, .* is 8 × 8 and .* is 4 × 8|is 4 × 8 and .* is 8 × 8"
    ):
        data.image_folder(tmp_path, "cats")
    (tmp_path / "test/dog/a.png").write_bytes(encoded(square, "PNG")[:-30])
    with pytest.raises(mw.DataError, match="test/dog/a.png is not a whole image"):
        data.image_folder(tmp_path, "cats")
    (tmp_path / "test/dog/a.png").rename(tmp_path / "stray.png")
    with pytest.raises(mw.DataError, match="expected train/<class>/<image> and .*, found stray.png"):
        data.image_folder(tmp_path, "cats")
    with pytest.raises(mw.DataError, match="no file or folder"):
        data.image_folder(tmp_path / "nowhere", "cats")


# --- one file ---------------------------------------------------------------------------------------------


def test_a_file_holds_all_of_it(tmp_path, signals, capsys):
    prepare(["mnist1d", str(tmp_path / "sub" / "mnist1d.npz")])
    assert "MNIST-1D, 4000 + 1000 examples" in capsys.readouterr().out
    found = data.load(tmp_path / "sub" / "mnist1d.npz")
    assert found.digest() == signals.digest()
    assert (found.name, found.classes, found.mean, found.std) == (
        signals.name,
        signals.classes,
        signals.mean,
        signals.std,
    )
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["mnist1d.npz"]
    with pytest.raises(SystemExit):
        prepare(["cifar10", str(tmp_path / "x.npz")])
    assert "cifar10 needs PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["mnist1d", "{0}/x.npz/y.npz"],
            "moonwalk.data: {0}/x.npz cannot be a folder: {0}/x.npz is a file",
        ),
        (["mnist1d", "{0}/x.txt"], "the file to write is a .npz, got {0}/x.txt"),
        (["cifar10", "{0}/nowhere", "{0}/y.npz"], "moonwalk.data: .*no file or folder {0}/nowhere"),
    ],
)
def test_what_cannot_be_prepared_is_one_line(arguments, said, tmp_path, capsys):
    (tmp_path / "x.npz").write_text("")
    with pytest.raises(SystemExit) as stopped:
        prepare([a.format(tmp_path) for a in arguments])
    words = str(stopped.value) + capsys.readouterr().err
    assert re.search(said.format(re.escape(str(tmp_path))), words), words


def test_files_that_are_none(tmp_path, signals):
    with pytest.raises(mw.DataError, match="no file .*; write one with data.save"):
        data.load(tmp_path / "nothing.npz")
    path = tmp_path / "half.npz"
    data.save(path, signals.take(20, 10))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(mw.DataError, match="half.npz is not a whole file that data.save wrote"):
        data.load(path)
    np.savez(path, train_x=np.zeros(3))
    with pytest.raises(mw.DataError, match="is not a whole file that data.save wrote"):
        data.load(path)


def test_it_needs_numpy_alone(tmp_path):
    """Reading a prepared file must not ask for Pillow, typer, rich or orbax."""
    code = (
        "import sys\n"
        "for name in ('PIL', 'typer', 'rich', 'orbax', 'matplotlib', 'flax'): sys.modules[name] = None\n"
        "from moonwalk import data, training\n"
        "assert data.mnist1d(examples=20).train_x.shape == (16, 40, 1)\n"
        "try: data.image_folder(sys.argv[1], 'cats')\n"
        "except ImportError as error: print(error)\n"
    )
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/a.png").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert "pip install 'moonwalk-jax[cli]'" in done.stdout, done.stderr


# --- the data set, and its batches ------------------------------------------------------------------------


def test_datasets_are_checked(signals):
    fields = dict(
        name="d",
        classes=("a", "b"),
        train_x=np.zeros((4, 3, 1), np.float32),
        train_y=np.zeros(4, np.int32),
        test_x=np.zeros((2, 3, 1), np.float32),
        test_y=np.zeros(2, np.int32),
        mean=(0.0,),
        std=(1.0,),
    )
    assert data.Dataset(**fields).in_shape == (3, 1)
    for change, message in [
        (dict(train_x=np.zeros((4, 3, 1))), "train_x must be uint8 or float32"),
        (
            dict(test_x=np.zeros((2, 4, 1), np.float32)),
            r"test examples \[4, 1\] differ from .* \[3, 1\]",
        ),
        (
            dict(test_y=np.zeros(3, np.int32)),
            r"test_y must be int32\[2\], one label per example, got int32\[3\]",
        ),
        (dict(train_y=np.full(4, 2, np.int32)), "labels of train_y must lie in 0 … 1, found 2 … 2"),
        (dict(std=(1.0, 1.0)), "one number for each of 1 channels"),
    ]:
        with pytest.raises(mw.DataError, match=message):
            data.Dataset(**(fields | change))
    few = signals.take(8, 4)
    assert (len(few.train_y), len(few.test_y), few.name) == (8, 4, "MNIST-1D, first 8 and 4")
    assert few.digest() != signals.digest()


def test_batches_are_a_function_of_seed_and_step(signals):
    whole = data.indices(10, 3, seed=5, start=0, count=12)
    for start in range(10):
        np.testing.assert_array_equal(data.indices(10, 3, 5, start, 2), whole[start : start + 2])
    for epoch in range(4):
        assert len(set(whole[3 * epoch : 3 * epoch + 3].ravel())) == 9  # nobody twice
    assert len({tuple(e.ravel()) for e in np.split(whole, 4)}) == 4  # each epoch in its own order
    assert (data.indices(10, 3, 6, 0, 12) != whole).any()
    stream = itertools.islice(data.batches(signals, 1500, seed=5), 5)
    for step, (x, y) in enumerate(stream):
        again_x, again_y = next(data.batches(signals, 1500, seed=5, step=step))
        np.testing.assert_array_equal(x, again_x)
        np.testing.assert_array_equal(y, again_y)
        assert y.shape == (1500,)


def test_batches_refuse():
    with pytest.raises(mw.DataError, match="batch must lie in 1 … 10, the number of examples, got 11"):
        data.indices(10, 11, 0, 0, 1)
    with pytest.raises(mw.DataError, match="must not be negative, got 0 and -1"):
        data.indices(10, 2, 0, -1, 1)
