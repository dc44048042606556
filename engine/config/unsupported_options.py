# SPDX-License-Identifier: Apache-2.0
"""vLLM's options for features that StrataKV lacks, each with a reason and an alternative.

The error for an unsupported option has the reason instead of the most similar option's name."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_DEVICE = "an engine computes on one device; start an engine for each"
_LORA = "see --lora-modules, --max-loras and --max-lora-rank; matrices of text are adapted alone"
_TOOLS = "see --tool-call-parser; other packages bring parsers as entry points"
_REASONING = (
    "thoughts are split off by their marks, which are looked for in the tokenizer; "
    "--reasoning-start and --reasoning-end name others"
)
_STRUCTURED = "see --structured-outputs-backend; requests say what white space they want"
_SPECULATIVE = "drafts are one row of tokens; see --speculative-method"
_MULTIMODAL = "chats take 16 pictures of up to 20 MiB, and no video or sound; see --media-domain"
_POOLING = "a server generates and makes embeddings; --pooling says which hidden states these are"
_MODEL_FILES = (
    "model and tokenizer are read as they lie in the model's directory; see --chat-template"
)
_COMPILED = "see --compilation and --enforce-eager"
_STEPS = "see --max-num-batched-tokens, --max-num-seqs and --long-prefill-token-threshold"
_LOGS = "see --log-level, --log-json and --log-stats"
_HTTP = "the server has the options that `stratakv serve --help` lists"
_MEMORY = "see --kv-cache-memory-bytes and --kv-offload"
_OBSERVED = "figures are at /metrics"
_STATES = "states are kept where prompts end and part; see --state-checkpoint-interval"

_BY_REASON: Mapping[str, str] = {
    _ONE_DEVICE: """
        tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_rank
        data_parallel_size_local data_parallel_start_rank data_parallel_address
        data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb
        data_parallel_external_lb decode_context_parallel_size prefill_context_parallel_size
        enable_expert_parallel enable_eplb eplb_config all2all_backend expert_placement_strategy
        disable_custom_all_reduce max_parallel_loading_workers
        ray_workers_use_nsight nnodes node_rank master_addr master_port worker_cls
        worker_extension_cls enable_dbo headless api_server_count
    """,
    "weights are computed in the number types of --dtype": """
        quantization quantization_param_path calculate_kv_scales
    """,
    _LORA: """
        lora_dtype lora_extra_vocab_size fully_sharded_loras default_mm_loras lora_target_modules
        enable_prompt_adapter
    """,
    _SPECULATIVE: "spec_token_tree",
    _TOOLS: "tool_parser_plugin tool_server",
    _REASONING: "reasoning_parser reasoning_parser_plugin enable_reasoning reasoning_config",
    _STRUCTURED: """
        structured_outputs_config guided_decoding_disable_fallback
        guided_decoding_disable_any_whitespace
    """,
    _MULTIMODAL: """
        limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_encoder_tp_mode mm_encoder_only media_io_kwargs allowed_local_media_path
        interleave_mm_strings skip_mm_profiling video_pruning_rate
        disable_chunked_mm_input enable_mm_embeds language_model_only
    """,
    _POOLING: "runner task convert pooler_config override_pooler_config",
    _MODEL_FILES: """
        tokenizer tokenizer_revision code_revision skip_tokenizer_init hf_config_path hf_overrides
        hf_token download_dir config_format model_impl model_loader_extra_config ignore_patterns
        rope_scaling rope_theta chat_template_content_format
        trust_request_chat_template override_generation_config response_role
    """,
    _COMPILED: """
        compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level
        max_seq_len_to_capture use_inductor_graph_partition
    """,
    _STEPS: """
        max_num_partial_prefills max_long_partial_prefills num_scheduler_steps num_lookahead_slots
        async_scheduling scheduler_cls stream_interval preemption_mode scheduler_delay_factor
        disable_hybrid_kv_cache_manager disable_cascade_attn disable_sliding_window
        logprobs_mode enable_prompt_embeds
    """,
    _MEMORY: """
        cpu_offload_gb cpu_offload_params enable_sleep_mode kv_events_config
        kv_sharing_fast_prefill
    """,
    _STATES: "mamba_cache_mode mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size",
    _LOGS: """
        enable_log_requests enable_log_outputs enable_log_deltas max_log_len log_config_file
        disable_uvicorn_access_log disable_access_log_for_endpoints log_error_stack
    """,
    _OBSERVED: """
        otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version
        observability_config enable_server_load_tracking kv_cache_metrics enable_mfu_metrics
    """,
    _HTTP: """
        uds root_path middleware disable_fastapi_docs enable_request_id_headers ssl_ciphers
        enable_ssl_refresh h11_max_incomplete_event_size h11_max_header_count
        disable_frontend_multiprocessing return_tokens_as_token_ids enable_force_include_usage
        additional_config io_processor_plugin enable_tokenizer_info_endpoint
    """,
}
NOT_BUILT: Mapping[str, str] = {
    name: reason for reason, names in _BY_REASON.items() for name in names.split()
}
# vLLM's short names of options on a command line.
_SHORT: Mapping[str, str] = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size", "ep": "enable_expert_parallel", "q": "quantization",
    "O": "optimization_level", "cc": "compilation_config", "asc": "api_server_count",
}  # fmt: skip


def explain_not_built(called: str, name: str) -> str:
    """Return a sentence that says why a vLLM option is not supported; "" for any other `name`.
    `called` is the option as typed; `name` has underscores and no leading dashes."""
    bare = name.removeprefix("no_")
    reason = NOT_BUILT.get(_SHORT.get(bare, bare))
    return f"{called} is an option of vLLM that is not built here: {reason}" if reason else ""
