"""Hugging Face's `generate` around a Neuron application, for transformers 4.45 to 4.51.

Follows NxDI 0.1.0 (`utils/hf_adapter.py`). `_sample` is its own, because the application keeps the
key-value cache and takes positions. The rest is transformers'.
"""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from neuron_cpu.errors import StandInError

from ..contract import building_under
from ..models.config import InferenceConfig, NeuronConfig, OnDeviceSamplingConfig, to_dict
from ..models.config import to_torch_dtype as _to_torch_dtype
from ..modules.generation.sampling import Sampler, prepare_sampling_params

SampleOutput: TypeAlias = GenerateDecoderOnlyOutput | torch.LongTensor


def load_pretrained_config(
    model_path_or_name: str | None = None, hf_config: PretrainedConfig | None = None
) -> Callable[[InferenceConfig], None]:
    """A hook for `InferenceConfig(load_config=...)` that copies a Hugging Face config.

    Exactly one argument is given. Every key becomes an attribute, and a nested config a namespace.
    The dtype goes to the NeuronConfig unless that names one.
    """
    if (model_path_or_name is None) == (hf_config is None):
        raise ValueError("load_pretrained_config takes a path or a config, exactly one of them.")

    def load_config(config: InferenceConfig) -> None:
        source = hf_config or AutoConfig.from_pretrained(model_path_or_name)
        content: dict[str, Any] = source.to_dict()
        dtype = content.pop("torch_dtype", None)
        if dtype is not None and not config.neuron_config.overrides_torch_dtype:
            named = _to_torch_dtype(dtype) if isinstance(dtype, str) else dtype
            config.neuron_config.torch_dtype = named
        for key, value in content.items():
            if isinstance(getattr(source, key, None), PretrainedConfig):
                content[key] = SimpleNamespace(**value)
        if source.attribute_map:
            config.attribute_map = dict(source.attribute_map)
        config.__dict__.update(content)

    return load_config


class GenerationAdapter(torch.nn.Module, GenerationMixin):
    """Makes `generate` drive a Neuron application. Streamers, stopping criteria and logits
    processors are transformers'. Under on-device sampling the application chooses the tokens.

    It is `HuggingFaceGenerationAdapter` without transformers' PreTrainedModel, whose imports take
    1.2 s and 106 MiB.
    """

    main_input_name = "input_ids"
    _supports_cache_class = True

    def __init__(self, model: Any, input_start_offsets: list[int] | None = None) -> None:
        if not hasattr(model.config, "neuron_config"):
            raise StandInError(
                f"The adapter's model is a {type(model).__name__}, expected a loaded Neuron model; "
                "write HuggingFaceGenerationAdapter(NeuronLlamaForCausalLM(FOLDER, config))."
            )
        self._take_config(_hf_config(model.config))
        if input_start_offsets:
            raise NotImplementedError("input_start_offsets are not supported; pass none.")
        self.neuron_model = model
        self.neuron_config = model.config.neuron_config
        self.on_device_sampling = model.on_device_sampling
        self.padding_side = self.neuron_config.padding_side
        self.sampler: Sampler | None = None
        self._contract = self.neuron_config.contract
        self.generation_config = self.generation_config or GenerationConfig()

    def _take_config(self, config: PretrainedConfig) -> None:
        torch.nn.Module.__init__(self)
        self.config = config
        self.generation_config = GenerationConfig.from_model_config(config)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.neuron_config.torch_dtype

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return self.neuron_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> SampleOutput:
        """transformers' `generate` on a fresh sequence."""
        for name in ("assistant_model", "prompt_lookup_num_tokens"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(
                    f"{name} asks for a loop of several tokens a step, which the imitation of NxDI "
                    "does not have, expected a token a step; run main.py with --speculate, or the "
                    "real libraries with --libraries."
                )
        self.neuron_model.reset()
        kwargs.setdefault("synced_gpus", False)  # or transformers imports FSDP to ask
        return super().generate(*args, **kwargs)

    @torch.no_grad()
    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any | None = None,
        logits_warper: LogitsProcessorList | None = None,
        **model_kwargs: Any,
    ) -> SampleOutput:
        """The decoding loop: ids (B, L) -> ids (B, L + new), or a dict with scores and logits."""
        del synced_gpus, streamer  # NxDI streams nothing: transformers gives it the prompt
        drawn = prepare_sampling_params(
            len(input_ids),
            generation_config.top_k,
            generation_config.top_p,
            generation_config.temperature,
        )
        if self._contract.generate_names_draws:
            model_kwargs["sampling_params"] = drawn
        collected: dict[str, list[torch.Tensor]] = {"scores": [], "logits": []}
        pad_token_id = _pad_token(generation_config)
        unfinished = torch.ones(input_ids.shape[0], dtype=torch.bool)
        while True:
            # The whole prompt at first, one token a call from then on.
            prefill = not self.neuron_model.kv_cache_populated
            inputs = self.prepare_inputs_for_generation(input_ids, **model_kwargs)
            outputs = self(**inputs, return_dict=True)
            if outputs.logits is not None:
                logits = outputs.logits[:, -1, :]
                scores = logits_processor(input_ids, logits.clone())
                if logits_warper is not None:
                    scores = logits_warper(input_ids, scores)
                for name, one in (("scores", scores), ("logits", logits)):
                    if getattr(generation_config, f"output_{name}"):
                        collected[name].append(one)
            if self.on_device_sampling:
                next_tokens = outputs.tokens.reshape(-1).long()
            else:
                next_tokens = self._sampler_for(generation_config)(scores, drawn).long()
            # Rows that are finished go on as padding, until all are.
            if pad_token_id is not None:
                next_tokens = torch.where(unfinished, next_tokens, pad_token_id)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            model_kwargs = self._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_for_token_generation=not prefill
            )
            stop = stopping_criteria(input_ids, tuple(collected["scores"]) or None)
            unfinished = unfinished & ~torch.as_tensor(stop, dtype=torch.bool)
            if not bool(unfinished.any()):
                break
        if not generation_config.return_dict_in_generate:
            return input_ids
        found = {name: tuple(each) or None for name, each in collected.items()}
        return GenerateDecoderOnlyOutput(sequences=input_ids, **found)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        past_key_values: Any | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        sampling_params: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of the next call: the whole prompt, or the last token at its position."""
        del past_key_values, inputs_embeds
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids.masked_fill_(attention_mask == 0, 1)
        if self.neuron_model.kv_cache_populated:
            input_ids = input_ids[:, -1:]
            position_ids = attention_mask.long().sum(dim=-1, keepdim=True)  # tokens before it
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        if sampling_params is not None:
            inputs["sampling_params"] = sampling_params
        for name in ("seq_ids", *self.neuron_model.get_required_kwargs()):
            if kwargs.get(name) is not None:
                inputs[name] = kwargs[name]
        return inputs

    def _update_model_kwargs_for_generation(
        self,
        outputs: Any,
        model_kwargs: dict[str, Any],
        is_for_token_generation: bool = True,
        is_encoder_decoder: bool = False,
        **_: Any,
    ) -> dict[str, Any]:
        """Extend the mask by the token that a step has cached; prefill caches no new one.

        Right padding puts the one in front, so that ones stay together. Left padding puts it at the
        end and drops the first column, because such caches move up.
        """
        del outputs, is_encoder_decoder
        mask = model_kwargs.get("attention_mask")
        if mask is not None and is_for_token_generation:
            one = mask.new_ones((mask.shape[0], 1))
            parts = [one, mask] if self.padding_side == "right" else [mask[:, 1:], one]
            model_kwargs["attention_mask"] = torch.cat(parts, dim=-1)
        return model_kwargs

    def _sampler_for(self, generation_config: GenerationConfig) -> Sampler:
        """NxDI's own sampler for the processed scores, with the first text's settings.

        It applies temperature and top_p again to scores that transformers has treated. NxDI 0.1
        draws even where `do_sample` is False (v0.1.0 and later, utils/hf_adapter.py).
        """
        if self.sampler is None:
            draws = None if self._contract.samples_by_default else generation_config.do_sample
            with building_under(self._contract):
                config = OnDeviceSamplingConfig(top_k=generation_config.top_k)
                own = NeuronConfig(on_device_sampling_config=config, on_cpu=True)
                self.sampler = Sampler(own, do_sample=draws)
        return self.sampler


def __getattr__(name: str) -> Any:
    """NxDI's class, made when somebody asks for it."""
    if name != "HuggingFaceGenerationAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _as_pretrained_model()


@functools.cache
def _as_pretrained_model() -> type:
    class HuggingFaceGenerationAdapter(GenerationAdapter, transformers.PreTrainedModel):
        __doc__ = GenerationAdapter.__doc__

        def _take_config(self, config: PretrainedConfig) -> None:
            transformers.PreTrainedModel.__init__(self, config)

    return HuggingFaceGenerationAdapter


def _hf_config(config: InferenceConfig) -> PretrainedConfig:
    """The model's attributes as a Hugging Face config, without the Neuron part."""
    skipped = ("neuron_config", "fused_spec_config", "metadata", "attribute_map")
    content = {k: copy.deepcopy(v) for k, v in vars(config).items() if k not in skipped}
    return PretrainedConfig(**{k: to_dict(v) for k, v in content.items()})


def _pad_token(generation_config: GenerationConfig) -> int | None:
    """The padding of finished rows: HF's prepared tensor, else the id, else EOS."""
    prepared = getattr(generation_config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    if generation_config.pad_token_id is not None:
        return generation_config.pad_token_id
    eos = generation_config.eos_token_id
    if isinstance(eos, list):
        return eos[0] if eos else None
    return eos
