"""What the imitation has otherwise than NxD and NxD Inference, each with its reason.

(kind, place, what) are patterns of `contracts.Difference`; of none is one that no release has.
"""

INNER = "own parts of the imitation, which no file that runs in the library can name"
STRICTER = "refused here as an unknown argument, where the library takes it"
LATER = (
    "one module, class or signature serves all releases: a file that names it was written for the "
    "release that has it, which NEURON_CPU_NXDI chooses"
)
CHECKED = "takes keywords of later releases; refuse_others() refuses unknown ones and features"
BASES = "called by keywords in the library and in models for it"
NOTHING = "what a file gets is the same"

ACCEPTED = [
    ("*", "*", "*of another release", LATER),
    ("module", "*", "of none", INNER),
    ("name", "*", "of none", INNER),
    ("member", "*", "of none", INNER),
    ("signature", "*", "takes no *", STRICTER),
    ("signature", "*", "needs *", STRICTER),
    ("signature", "*/moe/*.__init__", "takes any keywords", CHECKED),
    ("signature", "*Parallel*.__init__", "takes any *", CHECKED),
    ("signature", "*ParallelEmbedding.__init__", "takes any keywords", CHECKED),
    ("signature", "*GroupQueryAttention_*.__init__", "takes any keywords", CHECKED),
    ("signature", "*NeuronAttentionBase.__init__", "takes any keywords", CHECKED),
    ("signature", "*ModelWrapper.__init__", "takes any keywords", CHECKED),
    ("signature", "*:initialize_model_parallel", "*", "other groups than one are refused"),
    ("signature", "*NeuronAttentionBase.__init__", "*config*", "refused where a release needs it"),
    ("signature", "*Attention*.forward", "takes any keywords", "refused in 0.1"),
    ("signature", "*.get_flash_attention_strategy", "does without *", "decides of two-core setups"),
    ("signature", "*:linear_with_async_allreduce", "reduce_dtype is *", "concerns gradients"),
    ("signature", "*Model.forward", "argument *", BASES),
    ("signature", "*Model.forward", "takes any keywords", "vision's, of later releases"),
    ("signature", "*Model.get_model_output", "*", BASES),
    ("signature", "*.load_hf_model", "takes any keywords", "models of later releases take them"),
    ("signature", "*.get_state_dict", "argument 1 is *", "called by position"),
    ("signature", "*.get_state_dict", "takes model_path of none", "the name of 0.1 and 0.2"),
    ("signature", "*.load", "skip_warmup is *", "a warm-up runs each graph once, for nothing here"),
    ("signature", "*CausalLM.forward", "llava_args is *", NOTHING),
    ("signature", "*ModelWrapper.__init__", "model_init_kwargs is *", NOTHING),
    ("signature", "*:GroupQueryAttention_QKV.__init__", "rms_norm_eps is *", NOTHING),
    ("signature", "*gqa.py:maybe_pad_*", "*", INNER),
    ("signature", "*:validate_sampling_params", "takes zero of none", INNER),
    ("signature", "*CustomRMSNorm.__init__", "does without hidden_size", LATER),
    ("signature", "*KVCacheManager.*", "*", BASES),
    ("signature", "*utils/benchmark.py:*", "*", "benchmarks, which no model calls"),
    ("read", "*BaseParallelLinear.*", "*", "its subclasses here set and read it themselves"),
    ("read", "*InferenceConfig.*", "*", "of models with vision, or attention in chunks"),
    ("read", "*NeuronQwen3MoeModel.*", "*", "of drafts and Medusa, which are the library's alone"),
    ("read", "*NeuronBaseModel.*", "*", "by a closed kernel only, which is refused"),
    ("read", "*._get_captured_tensors_offset", "*", "only where 0.7 and later capture tensors"),
    ("signature", "*Qwen3MoeForCausalLM.enable_*", "takes any keywords", NOTHING),
]

EXPERTS = "inside of the experts, whose parts no file replaces one by one"
# The same of what is seen from below (`seams.differences`).
SEAMS = [
    ("parameters", "*", "rank_ordering is nothing, not None", "a tag that says nothing"),
    ("calls", "*: Sampler", "rank_id is *", "no file has a sampler of its own"),
    ("calls", "*: Sampler", "result is int32*", "a device has no 64 bits"),
    ("calls", "on device: NeuronLlamaModel", "result is ?'int32*", "a device has no 64 bits"),
    ("calls", "*: Expert*", "*", EXPERTS),
    ("calls", "*: RouterTopK", "*", EXPERTS),
    ("calls", "*: MoE", "is_speculative_decoding is *", EXPERTS),
    ("parameters", "*: *expert_mlps*", "is not there", EXPERTS),
    ("parameters", "*: *linear_router*", "sequence_parallel_enabled is *", "concerns gradients"),
    ("calls", "*: ModuleMarker*Wrapper", "is not there", "marks for the compiler alone"),
    ("calls", "*Attention", "is*there", "the name of NxDI is that of no model here"),
    ("*", "vocabulary parallel: *", "*", "NxDI ignores the option for experts"),
]
