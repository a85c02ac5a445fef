"""Hugging Face's `generate` around a Neuron application, for transformers 4.45 to 4.51.

Follows NxDI 0.1.0 (`utils/hf_adapter.py`): its own `_sample`, because the application keeps the
key-value cache and takes positions; everything else is transformers'.
"""

import copy
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from neuronx_distributed.utils.medusa_utils import TOPK, generate_medusa_buffers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..models.config import InferenceConfig, to_dict
from ..models.config import to_torch_dtype as _to_torch_dtype

SampleOutput = Union[GenerateDecoderOnlyOutput, torch.LongTensor]


def load_pretrained_config(
    model_path_or_name: Optional[str] = None, hf_config: Optional[PretrainedConfig] = None
) -> Callable[[InferenceConfig], None]:
    """A hook for `InferenceConfig(load_config=...)` that copies a Hugging Face config.

    Exactly one argument is given. Every key becomes an attribute; the dtype goes to the
    NeuronConfig unless that names one itself; nested configs become namespaces.
    """
    if (model_path_or_name is None) == (hf_config is None):
        raise ValueError("load_pretrained_config takes a path or a config, exactly one of them.")

    def load_config(config: InferenceConfig) -> None:
        source = hf_config or AutoConfig.from_pretrained(model_path_or_name)
        content: Dict[str, Any] = source.to_dict()
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


class HuggingFaceGenerationAdapter(PreTrainedModel, GenerationMixin):
    """Makes `generate` drive a Neuron application.

    Greedy and multinomial decoding, streamers, stopping criteria and logits processors are those
    of transformers; under on-device sampling the application's tokens are taken as they are.
    """

    main_input_name = "input_ids"

    def __init__(self, model: Any, input_start_offsets: Optional[List[int]] = None) -> None:
        super().__init__(_hf_config(model.config))
        if input_start_offsets:
            raise NotImplementedError("input_start_offsets are not supported; pass none.")
        self.neuron_model = model
        self.neuron_config = model.config.neuron_config
        self.on_device_sampling = model.on_device_sampling
        self.padding_side = self.neuron_config.padding_side
        self.generation_config = self.generation_config or GenerationConfig()

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
        self.neuron_model.reset()
        return super().generate(*args, **kwargs)

    @torch.no_grad()
    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Optional[Any] = None,
        logits_warper: Optional[LogitsProcessorList] = None,
        **model_kwargs: Any,
    ) -> SampleOutput:
        """The decoding loop: ids (B, L) -> ids (B, L + new), or a dict with scores and logits."""
        del synced_gpus
        names = model_kwargs.get("adapter_ids")
        if names is not None and not isinstance(names, torch.Tensor):
            if len(names) != input_ids.shape[0]:
                raise ValueError(
                    f"There are {len(names)} adapter_ids, expected one for each of "
                    f"{input_ids.shape[0]} prompts; id '0' is the base model."
                )
            model_kwargs["adapter_ids"] = self.neuron_model.adapter_indices(names)
        collected: Dict[str, List[torch.Tensor]] = {"scores": [], "logits": []}
        pad_token_id = _pad_token(generation_config)
        unfinished = torch.ones(input_ids.shape[0], dtype=torch.bool)
        while True:
            # The whole prompt at first, one token a call from then on.
            prefill = not self.neuron_model.kv_cache_populated
            inputs = self.prepare_inputs_for_generation(input_ids, **model_kwargs)
            outputs = self(**inputs, return_dict=True)
            if self.on_device_sampling:
                next_tokens = outputs.tokens.reshape(-1).long()
            else:
                logits = outputs.logits[:, -1, :]
                scores = logits_processor(input_ids, logits.clone())
                if logits_warper is not None:
                    scores = logits_warper(input_ids, scores)
                self._collect(generation_config, collected, scores, logits)
                next_tokens = _choose_token(scores, generation_config)
            # Rows that are finished go on as padding, until all are.
            if pad_token_id is not None:
                next_tokens = torch.where(unfinished, next_tokens, pad_token_id)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(next_tokens.cpu())
            model_kwargs = self._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_for_token_generation=not prefill
            )
            stop = stopping_criteria(input_ids, tuple(collected["scores"]) or None)
            unfinished = unfinished & ~torch.as_tensor(stop, dtype=torch.bool)
            if not bool(unfinished.any()):
                break
        if streamer is not None:
            streamer.end()
        return self._result(generation_config, input_ids, collected)

    @torch.no_grad()
    def _assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        candidate_generator: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Optional[Any] = None,
        logits_warper: Optional[LogitsProcessorList] = None,
        **model_kwargs: Any,
    ) -> SampleOutput:
        """Decoding with guessed continuations (a draft model's, or prompt lookup), checked several
        at a time.

        One call of the speculation model gives the scores behind the last token and behind each
        guess. Tokens are chosen one after the other as without guesses, and the call is worth as
        many of them as agree with the guess, plus one: the result is the same, in fewer calls.
        """
        del synced_gpus, logits_warper
        if self.neuron_config.is_medusa:
            return self._medusa_assisted_decoding(
                input_ids, stopping_criteria, generation_config, streamer
            )
        if self.neuron_config.enable_fused_speculation:
            params = model_kwargs.get("sampling_params")
            return self._fused_assisted_decoding(
                input_ids, stopping_criteria, generation_config, streamer, params
            )
        self._check_assisted(input_ids)
        assistant = getattr(candidate_generator, "assistant_model", None)
        if assistant is not None:
            candidate_generator = _DraftCandidates(assistant)
        collected: Dict[str, List[torch.Tensor]] = {"scores": [], "logits": []}
        stopped = False
        while not stopped:
            guesses = self._guesses(candidate_generator, input_ids)
            logits = self._verify_guesses(input_ids, guesses)  # (T, V): T >= 1
            for step, row in enumerate(logits):
                scores = logits_processor(input_ids, row[None].clone())
                self._collect(generation_config, collected, scores, row[None])
                token = _choose_token(scores, generation_config)
                input_ids = torch.cat([input_ids, token[:, None]], dim=-1)
                if streamer is not None:
                    streamer.put(token.cpu())
                stop = stopping_criteria(input_ids, tuple(collected["scores"]) or None)
                stopped = bool(torch.as_tensor(stop).all())
                if stopped or step >= len(guesses) or int(token) != int(guesses[step]):
                    break
        if streamer is not None:
            streamer.end()
        return self._result(generation_config, input_ids, collected)

    def _fused_assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Optional[Any],
        sampling_params: Optional[torch.Tensor],
    ) -> SampleOutput:
        """Rounds of fused speculation: ids (1, L) -> ids (1, L + new).

        Ends where the criteria say so, or where the cache has no room for a whole round.
        """
        if len(input_ids) > 1:
            raise ValueError(
                f"Fused speculation generates for one row, got {len(input_ids)}; pass one prompt."
            )
        collected: Dict[str, List[torch.Tensor]] = {"scores": [], "logits": []}
        inputs = self.prepare_inputs_for_generation(input_ids, sampling_params=sampling_params)
        outputs = self(**inputs).fused_outputs
        tokens, logits = self._accepted(outputs, None)
        while True:
            for step, token in enumerate(tokens):
                if logits is not None:
                    row = logits[:, step]
                    self._collect(generation_config, collected, row, row)
                input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=-1)
                if streamer is not None:
                    streamer.put(input_ids[0, -1:].cpu())
                stop = stopping_criteria(input_ids, tuple(collected["scores"]) or None)
                if bool(torch.as_tensor(stop).all()):
                    break
            place = input_ids.shape[1] - 1
            room = self.neuron_config.max_length - self.neuron_config.speculation_length
            if bool(torch.as_tensor(stop).all()) or place > room:
                break
            outputs = self(
                input_ids=input_ids[:, -1:],
                attention_mask=torch.ones((1, place), dtype=torch.int64),
                position_ids=torch.tensor([[place]]),
                sampling_params=sampling_params,
            ).fused_outputs
            tokens, logits = self._accepted(outputs, place)
        if streamer is not None:
            streamer.end()
        return self._result(generation_config, input_ids, collected)

    def _medusa_assisted_decoding(
        self,
        input_ids: torch.LongTensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Optional[Any],
    ) -> SampleOutput:
        """Rounds of Medusa, to the last token: ids (1, L) -> ids (1, L + new)."""
        tree = MedusaTree(self.neuron_config)
        outputs = self(**self.prepare_inputs_for_generation(input_ids))
        tokens, lists = outputs.tokens[0, 0, :1].tolist(), outputs.hidden_states[1:, 0]
        while True:
            for token in tokens:
                input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], dim=-1)
                if streamer is not None:
                    streamer.put(input_ids[0, -1:].cpu())
                if bool(torch.as_tensor(stopping_criteria(input_ids, None)).all()):
                    return self._result(generation_config, input_ids, {"scores": [], "logits": []})
            inputs = tree.inputs(input_ids, lists)
            outputs = self(**inputs)
            tokens, lists = tree.verdict(outputs.tokens[0, 0], outputs.hidden_states[1:, 0])

    def _accepted(
        self, outputs: List[torch.Tensor], place: Optional[int]
    ) -> Tuple[List[int], Optional[torch.Tensor]]:
        """The tokens of a call of the fused model whose newest token stood at `place` (None: of a
        prefill), and the target's logits (1, T, V) if it has any."""
        logits = outputs[-1] if self.neuron_config.output_logits else None
        in_graph = self.neuron_config.contract.accepts_in_graph
        if place is None:
            return outputs[0 if in_graph else 1].reshape(-1)[:1].tolist(), logits
        if in_graph:
            return outputs[0][0, : int(outputs[3]) - place].tolist(), logits
        # 0.1 returns the draft's and the target's tokens, EAGLE's behind the newest one.
        eagle = self.neuron_config.enable_eagle_speculation
        guesses = outputs[0][0, 1:] if eagle else outputs[0][0, :-1]
        tokens = outputs[1][0]
        agreed = int((guesses == tokens[:-1]).long().cumprod(dim=0).sum())
        return tokens[: agreed + 1].tolist(), logits

    def _check_assisted(self, input_ids: torch.LongTensor) -> None:
        """Refuse what the speculation model cannot serve."""
        if self.neuron_config.speculation_length < 2:
            raise ValueError(
                "Assisted decoding needs a speculation model, expected speculation_length of at "
                f"least 2 in the NeuronConfig, got {self.neuron_config.speculation_length}; "
                "compile with it."
            )
        if self.on_device_sampling or self.padding_side == "left" or len(input_ids) > 1:
            raise ValueError(
                "Assisted decoding takes one right-padded row whose logits come to the host; "
                "compile without on-device sampling and with padding_side='right', and pass one "
                "prompt."
            )

    def _guesses(self, candidate_generator: Any, input_ids: torch.LongTensor) -> torch.Tensor:
        """Guessed next tokens (n,), at most one fewer than the speculation model takes.

        None before prefill, and no more than the cache has places for.
        """
        room = self.neuron_config.max_length - input_ids.shape[1]
        room = min(room, self.neuron_config.speculation_length - 1)
        if not self.neuron_model.kv_cache_populated or room < 1:
            return input_ids.new_empty(0)
        candidates, _ = candidate_generator.get_candidates(input_ids)
        return candidates[0, input_ids.shape[1] :][:room]

    def _verify_guesses(self, input_ids: torch.LongTensor, guesses: torch.Tensor) -> torch.Tensor:
        """Logits (1 + n, V) behind the last token and behind each of n guesses."""
        cached = input_ids.shape[1] - 1
        decodes = hasattr(self.neuron_model, "token_generation_model")
        if len(guesses) == 0 and (decodes or not self.neuron_model.kv_cache_populated):
            mask = torch.ones_like(input_ids)
            mask = mask[:, :-1] if self.neuron_model.kv_cache_populated else mask
            inputs = self.prepare_inputs_for_generation(input_ids, attention_mask=mask)
            return self(**inputs).logits[0]
        # Near the cache's end the call begins earlier: tokens that are cached are written again.
        length = self.neuron_config.speculation_length
        start = min(cached, self.neuron_config.max_length - length)
        known = torch.cat([input_ids[0, start:], guesses])
        tokens = input_ids.new_zeros((1, length))  # what lies behind the guesses is not looked at
        tokens[0, : len(known)] = known
        outputs = self(
            input_ids=tokens,
            attention_mask=torch.ones((1, start), dtype=torch.int64),
            position_ids=torch.arange(start, start + length)[None],
        )
        first = cached - start
        return outputs.logits[0, first : first + 1 + len(guesses)]

    @staticmethod
    def _collect(
        generation_config: GenerationConfig,
        collected: Dict[str, List[torch.Tensor]],
        scores: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        """Keep what the caller asked to see."""
        if not generation_config.return_dict_in_generate:
            return
        if generation_config.output_scores:
            collected["scores"].append(scores)
        if generation_config.output_logits:
            collected["logits"].append(logits)

    @staticmethod
    def _result(
        generation_config: GenerationConfig,
        input_ids: torch.LongTensor,
        collected: Dict[str, List[torch.Tensor]],
    ) -> SampleOutput:
        if not generation_config.return_dict_in_generate:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=tuple(collected["scores"]) or None,
            logits=tuple(collected["logits"]) or None,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        past_key_values: Optional[Any] = None,
        attention_mask: Optional[torch.Tensor] = None,
        inputs_embeds: Optional[torch.Tensor] = None,
        sampling_params: Optional[torch.Tensor] = None,
        adapter_ids: Optional[torch.Tensor] = None,
        **kwargs: Any,
    ) -> Dict[str, Any]:
        """Inputs of the next call: the whole prompt, or the last token at its position."""
        del past_key_values, inputs_embeds
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids.masked_fill_(attention_mask == 0, 1)
        if self.neuron_model.kv_cache_populated:
            input_ids = input_ids[:, -1:]
            position_ids = self._next_position(attention_mask)
        inputs: Dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        if sampling_params is not None:
            inputs["sampling_params"] = sampling_params
        if adapter_ids is not None:
            inputs["adapter_ids"] = adapter_ids
        for name in ("seq_ids", *self.neuron_model.get_required_kwargs()):
            if kwargs.get(name) is not None:
                inputs[name] = kwargs[name]
        return inputs

    @staticmethod
    def _next_position(attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, 1): the mask shows the tokens before the new one, so their count is its position."""
        return attention_mask.long().sum(dim=-1, keepdim=True)

    def _update_model_kwargs_for_generation(
        self,
        outputs: Any,
        model_kwargs: Dict[str, Any],
        is_for_token_generation: bool = True,
        is_encoder_decoder: bool = False,
        **_: Any,
    ) -> Dict[str, Any]:
        """Extend the mask by the token that the step has cached; prefill has cached no new one.

        Right padding: a one in front, so that ones stay together. Left padding: a one behind.
        """
        del outputs, is_encoder_decoder
        mask = model_kwargs.get("attention_mask")
        if mask is not None and is_for_token_generation:
            one = mask.new_ones((mask.shape[0], 1))
            parts = [one, mask] if self.padding_side == "right" else [mask, one]
            model_kwargs["attention_mask"] = torch.cat(parts, dim=-1)
        return model_kwargs


class MedusaTree:
    """What a Medusa graph is asked, and what its answer is worth, round by round.

    The cache holds every token but the newest, which is the tree's root. New rows are written
    behind the cached ones, node by node; the next call moves those of the accepted path together.
    """

    def __init__(self, neuron_config: Any) -> None:
        made = generate_medusa_buffers(neuron_config.medusa_tree)
        self.mask, self.places = made["medusa_attn_mask"], made["tree_indices"]
        self.depths, self.paths = made["medusa_position_ids"], made["retrieve_indices"]
        if len(self.mask) != neuron_config.medusa_speculation_length:
            raise ValueError(
                f"The tree of medusa_tree has {len(self.mask)} nodes, the newest token among them, "
                f"expected medusa_speculation_length {neuron_config.medusa_speculation_length}; "
                "change one of them."
            )
        self.longest = neuron_config.max_length
        self.width = neuron_config.num_medusa_heads + 1
        self._nodes: List[int] = []  # of the last call that were accepted
        self._cached = 0  # tokens in front of the last call

    def inputs(self, input_ids: torch.Tensor, lists: torch.Tensor) -> Dict[str, Any]:
        """The next call behind input_ids (1, L), with the heads' lists (heads, top_k) for it."""
        newest = input_ids.shape[1] - 1
        rows = torch.arange(newest - len(self._nodes), newest)
        accepted = torch.tensor(self._nodes, dtype=torch.int64) + self._cached
        padding = max(0, self.width - len(rows))  # rows that stay where they are
        still = torch.zeros(padding, dtype=torch.int64)
        self._cached = newest
        candidates = torch.cat([input_ids[0, -1:], lists[:, :TOPK].flatten().long()])
        self._tokens = candidates[self.places]
        where = (newest + torch.arange(len(self.mask))).clamp_max(self.longest - 1)
        medusa = (torch.cat([accepted, still]), torch.cat([rows, still]), self.mask, where)
        return dict(
            input_ids=self._tokens[None],
            attention_mask=torch.ones((1, newest), dtype=torch.int64),
            position_ids=(newest + self.depths).clamp_max(self.longest - 1)[None],
            medusa_args=[part[None].to(torch.int32) for part in medusa],
        )

    def verdict(self, tokens: torch.Tensor, lists: torch.Tensor) -> Tuple[List[int], torch.Tensor]:
        """Tokens of the best path and one more, and the heads' lists (heads, top_k) at its end.

        tokens (M, top_k) of the head, lists (heads, M, top_k) of Medusa's.
        """
        best = tokens[:, 0].long()
        usable = self._cached + torch.arange(len(self.mask)) < self.longest - 1
        paths = []
        for path in self.paths.tolist():
            nodes = [0]
            for node in path[1:]:
                if node < 0 or not usable[node] or self._tokens[node] != best[nodes[-1]]:
                    break
                nodes.append(node)
            paths.append(nodes)
        self._nodes = max(paths, key=len)
        return best[self._nodes].tolist(), lists[:, self._nodes[-1]]


class _DraftCandidates:
    """Candidates of an assistant, another adapter: its own greedy tokens.

    As NxDI it runs `num_assistant_tokens` steps a round, of which the last only fills the cache. A
    round goes on behind what the assistant's cache shares with the text.
    """

    def __init__(self, assistant: Any) -> None:
        assistant.neuron_model.reset()
        self.adapter = assistant
        self.steps = int(assistant.generation_config.num_assistant_tokens)
        self._cached: List[int] = []

    def get_candidates(self, input_ids: torch.Tensor) -> Tuple[torch.Tensor, None]:
        """input_ids (1, L) with the candidates behind them, as transformers' generators give."""
        text = input_ids[0].tolist()
        if not self._cached:
            inputs = self.adapter.prepare_inputs_for_generation(input_ids[:, :-1])
            self.adapter(**inputs)
            self._cached = text[:-1]
        pairs = zip(self._cached, text, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._cached))
        del self._cached[min(shared, len(text) - 1) :]
        most = self.adapter.neuron_config.max_length
        for _ in range(self.steps):
            for token in text[len(self._cached) : most]:
                logits = self._step(token)
            if len(self._cached) == most:
                break
            text.append(int(logits.argmax()))
        return input_ids.new_tensor([text]), None

    def _step(self, token: int) -> torch.Tensor:
        """Logits (V,) behind one more cached token."""
        place = len(self._cached)
        outputs = self.adapter(
            input_ids=torch.tensor([[token]]),
            attention_mask=torch.ones((1, place), dtype=torch.int64),
            position_ids=torch.tensor([[place]]),
        )
        self._cached.append(token)
        return outputs.logits[0, -1]


def _hf_config(config: InferenceConfig) -> PretrainedConfig:
    """The model's attributes as a Hugging Face config, without the Neuron part."""
    skipped = ("neuron_config", "fused_spec_config", "metadata", "attribute_map")
    content = {k: copy.deepcopy(v) for k, v in vars(config).items() if k not in skipped}
    return PretrainedConfig(**{k: to_dict(v) for k, v in content.items()})


def _pad_token(generation_config: GenerationConfig) -> Optional[int]:
    """What finished rows are filled with: HF's prepared tensor, else the id, else EOS."""
    prepared = getattr(generation_config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    if generation_config.pad_token_id is not None:
        return generation_config.pad_token_id
    eos = generation_config.eos_token_id
    if isinstance(eos, list):
        return eos[0] if eos else None
    return eos


def _choose_token(scores: torch.Tensor, generation_config: GenerationConfig) -> torch.Tensor:
    """(B,) int64: the arg-maximum, or a draw from the processed scores (B, V)."""
    if not generation_config.do_sample or generation_config.top_k == 1:
        return torch.argmax(scores, dim=-1)
    return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
