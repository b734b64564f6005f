"""Folders of images: classes, augmentation, and what is no image."""

from pathlib import Path

import pytest
import torch

from bamboo_trainer.data import dataset_from, open_sources


def painted(folder: Path, names: dict[str, tuple[int, int, int]], size=(40, 30)) -> Path:
    Image = pytest.importorskip("PIL.Image")
    for name, colour in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", size, colour)
        image.paste((255, 255, 255), (0, 0, size[0] // 2, size[1]))  # so that a mirror image differs
        image.save(path)
    return folder


COLOURS = {"dog/a.png": (255, 0, 0), "cat/deep/b.png": (0, 255, 0), "cat/c.PNG": (0, 0, 255)}


def test_images_have_the_class_of_their_folder(tmp_path):
    folder = painted(tmp_path, COLOURS)
    (tmp_path / "notes.txt").write_text("no image")
    config = {"kind": "images", "path": str(folder), "size": 8, "mean": [0, 0, 0], "std": [1, 1, 1]}
    data = dataset_from(config)
    assert data.classes == ("cat", "dog")
    (images,), (targets,) = data.batch([0, 1, 2])
    assert images.shape == (3, 3, 8, 8)
    assert targets.tolist() == [0, 0, 1]
    assert images[:, :, 4, 7].tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert torch.equal(images[:, :, 4, 0], torch.ones(3, 3))


def test_augmentation_depends_on_the_samples_number_alone(tmp_path):
    folder = painted(tmp_path, COLOURS)
    config = {"kind": "images", "path": str(folder), "size": 8, "augment": True, "variants": 6}
    data = dataset_from(config)
    assert len(data) == 18
    (images,), (targets,) = data.batch(range(18))
    (again,), _ = dataset_from(config).batch(list(range(17, -1, -1)))
    assert torch.equal(images, again.flip(0))
    assert targets.tolist() == [0] * 12 + [1] * 6
    assert len({image.numpy().tobytes() for image in images[:6]}) > 2


def test_what_is_no_image_is_named(tmp_path):
    folder = painted(tmp_path, {"a/x.png": (1, 2, 3)})
    (folder / "a" / "y.png").write_bytes(b"rubbish")
    data = dataset_from({"kind": "images", "path": str(folder)})
    data.batch([0])
    with pytest.raises(ValueError, match=r"y\.png is no image that can be read"):
        data.batch([1])
    (folder / "stray.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data: .*stray.png is in no folder of a class"):
        dataset_from({"kind": "images", "path": str(folder)})


def test_classes_are_the_folders_also_where_one_has_no_image(tmp_path):
    folder = painted(tmp_path, {"cat/a.png": (1, 2, 3), "eel/b.png": (1, 2, 3)})
    (folder / "dog").mkdir()
    config = {"kind": "images", "path": str(folder), "size": 8}
    with pytest.raises(ValueError, match=r"^data: .*/dog has no image, so it is no class"):
        dataset_from(config)
    data = dataset_from({**config, "classes": ["cat", "dog", "eel"]})
    assert data.batch([0, 1])[1][0].tolist() == [0, 2]
    with pytest.raises(ValueError, match="images of a class 'eel', which is none of classes: cat, dog"):
        dataset_from({**config, "classes": ["cat", "dog"]})
    with pytest.raises(ValueError, match="classes must be different names"):
        dataset_from({**config, "classes": ["cat", "eel", "cat"]})


def test_a_link_that_leads_back_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    names = [source.name for source in open_sources(str(tmp_path), (".txt",)).files]
    assert names == [f"{tmp_path}/a/x.txt", f"{tmp_path}/b/x.txt"]
