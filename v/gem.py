import json, sys, torch, os
from pathlib import Path
from safetensors.torch import save_file
def make(folder, seed=0, layers=6, window=64):
    H, L, HEADS, KV, D, V = 128, layers, 4, 2, 32, 512
    folder=Path(folder); folder.mkdir(parents=True, exist_ok=True)
    types=["full_attention" if (i+1)%3==0 else "sliding_attention" for i in range(L)]
    cfg=dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=H, intermediate_size=2*H, num_hidden_layers=L, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=D, vocab_size=V, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window=window, layer_types=types, query_pre_attn_scalar=D, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, torch_dtype="float32", bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_logit_softcapping=None, final_logit_softcapping=None)
    (folder/"config.json").write_text(json.dumps(cfg))
    g=torch.Generator().manual_seed(seed)
    w=lambda *s, scale: torch.randn(*s, generator=g)*scale
    t={"model.embed_tokens.weight": w(V,H,scale=0.05), "model.norm.weight": torch.zeros(H)}
    for i in range(L):
        n=f"model.layers.{i}."
        for p,c in {"q":HEADS*D,"k":KV*D,"v":KV*D}.items(): t[f"{n}self_attn.{p}_proj.weight"]=w(c,H,scale=0.25)
        t[f"{n}self_attn.o_proj.weight"]=w(H,HEADS*D,scale=0.25)
        for p in ("q_norm","k_norm"): t[f"{n}self_attn.{p}.weight"]=torch.zeros(D)
        for p in ("gate","up"): t[f"{n}mlp.{p}_proj.weight"]=w(2*H,H,scale=0.1)
        t[f"{n}mlp.down_proj.weight"]=w(H,2*H,scale=0.1)
        for p in ("input_layernorm","post_attention_layernorm","pre_feedforward_layernorm","post_feedforward_layernorm"): t[f"{n}{p}.weight"]=torch.full((H,), 3.0) if p.startswith("post") else torch.zeros(H)
    save_file(t, str(folder/"model.safetensors"), metadata={"format":"pt"})
make("/tmp/wt/out/v/gemma", layers=int(os.environ.get("L","7")))
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
from vllm import LLM, SamplingParams
import random
extra={}
if len(sys.argv)>1:
    extra["kv_transfer_config"]=json.loads(sys.argv[1])
llm=LLM("/tmp/wt/out/v/gemma", enforce_eager=True, skip_tokenizer_init=True, num_gpu_blocks_override=int(os.environ.get("NB","120")), block_size=32, dtype="float32", max_model_len=512, max_num_batched_tokens=512, max_num_seqs=8, disable_log_stats=False, **extra)
core=llm.llm_engine.engine_core.engine_core
c=core.scheduler.kv_cache_config
print("GROUPS", [(type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size, getattr(g.kv_cache_spec,'sliding_window',None), g.layer_names) for g in c.kv_cache_groups])
print("TENSORS", [(t.layers, t.layer_stride, t.block_stride, t.offset, t.size) for t in c.kv_cache_tensors], c.kv_cache_layout, c.num_blocks)
rnd=random.Random(1)
prompts=[{"prompt_token_ids":[rnd.randrange(3,512) for _ in range(300)]} for _ in range(4)]
sp=SamplingParams(max_tokens=6,temperature=0,ignore_eos=True,detokenize=False)
for _ in range(2):
    for p in prompts:
        o=llm.generate([p],sp,use_tqdm=False)[0]
        print(list(o.outputs[0].token_ids), o.num_cached_tokens)
