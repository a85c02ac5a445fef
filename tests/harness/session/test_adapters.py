"""Numbers of adapters, as each release of NxDI counts them."""

from types import SimpleNamespace

from harness.session import adapters


class Later:
    """LoraServingConfig from 0.7 on."""

    def __init__(self, max_loras=1, dynamic_multi_lora=False): ...


def later(room):
    """An application of 0.7: names of two adapters, and room for more."""
    names = {"one": 0, "two": 1}
    config = SimpleNamespace(max_loras=room)
    manager = SimpleNamespace(lora_adapter_id_mapping=names, lora_config=config)
    return SimpleNamespace(lora_model_manager=manager)


def test_the_model_itself_is_an_adapter_of_zeros_where_a_release_has_no_number_for_it(monkeypatch):
    monkeypatch.setattr(adapters, "LoraServingConfig", Later)
    room = adapters.room_for_adapters(2, rows=1)
    assert room == {"max_loras": 3, "batch_size": 1}
    model = later(room["max_loras"])
    assert adapters.numbered(model, [0, 1, 2, 0]).tolist() == [2, 0, 1, 2]
    adapters.name_the_model(model)
    assert model.lora_model_manager.lora_adapter_id_mapping == {"0": 2, "one": 0, "two": 1}


def test_room_is_never_less_than_a_batch_has_rows(monkeypatch):
    monkeypatch.setattr(adapters, "LoraServingConfig", Later)
    room = adapters.room_for_adapters(2, rows=8)
    assert room == {"max_loras": 8, "batch_size": 8}
    assert adapters.numbered(later(8), [0, 2]).tolist() == [7, 1]


def test_releases_that_count_from_one_are_left_alone():
    assert adapters.room_for_adapters(2, rows=1) == {}
    model = SimpleNamespace()
    adapters.name_the_model(model)
    assert adapters.numbered(model, [0, 1, 2]).tolist() == [0, 1, 2] and not vars(model)
