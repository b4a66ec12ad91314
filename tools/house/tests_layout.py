"""The tests' layout as a map for merge.py."""
import json
import sys
from pathlib import Path

G={
'core':{'observe':'observe observe_noise observe_tiles','quantised':'quantised','bytes':'bytes_budget quantised_runs dry_run_bits','layer_budgets':'layer_budgets','threshold':'threshold','head_budgets':'head_budgets','duo':'duo','selection':'selection select','needs':'needs','bounded_prefill':'bounded_prefill','spans':'spans','second_pass':'second_pass local_attention','layer':'layer_cache holding cache_config','row_mask':'golden_rowmask','step':'step shared_copies','device':'device_memory device_purity devices','gpu':'gpu memory_gpu retrieval_gpu capture_gpu','triton':'triton_observe triton_step','capture':'capture capture_table','warm':'warm memory'},
'methods':{'kept_sets':'kept_sets','planted':'planted planted_configs','reference':'reference','properties':'properties','together':'together determinism','method_scores':'method_scores','authors_2025':'authors_2025',**{f'peers_{x}'.rstrip('_'):f'peers_{x}'.rstrip('_') for x in('','adakv','wrappers','kvzip','dms','duo')}},
'retrieval':{'retrieval':'retrieval retrieval_late','retrieval_oracles':'retrieval_oracles','offload':'offload','streams':'streams','kmeans':'kmeans'},
'hf':{'checkpoints':'checkpoints','gguf':'gguf','fetch':'fetch hub','patch':'patch canary','linear':'linear','rounded_weights':'rounded_weights','calibration':'calibration','kvzap':'kvzap','testbed_models':'testbed_models','identity':'identity padding','moving_rope':'moving_rope','chat_template':'chat_template chat_prompts'},
'generate':{'generation':'generation bad_input','question':'question','divergence':'divergence','kept_text':'kept_text','real':'real','quantised_real':'quantised_real','canary':'','found':'found_by_review'},
'tasks':{'tasks':'tasks','more_tasks':'more_tasks','articles':'articles news','needle':'needle','longbench':'longbench longbench_average','longbench_metrics':'longbench_metrics','data':'data_changes asked','instructions':'instructions long_answers','many_questions':'many_questions','testbed':'testbed','lm_eval_tasks':'lm_eval_tasks','fuzz_rows':'fuzz_rows'},
'lm_eval':{'lm_eval_model':'lm_eval_model'},
'run':{'command':'command','conf':'conf','mistakes':'mistakes','fuzz_config':'fuzz_config','security':'security','record':'record','runner':'runner','beyond_context':'beyond_context','lm_eval_run':'lm_eval_run','conversations':'conversations','crew':'crew','shipping':'shipping','search':'search','shared_prefill':'shared_prefill','sweep_divergence':'sweep_divergence','dry_run':'dry_run dry_run_groups dry_run_speeds','question_runner':'question_runner question_place','protocols':'protocols','tasks_run':'tasks_run','user_methods':'user_methods','install':'install','retrieval_runner':'retrieval_runner real_tasks'},
'results':{'results':'results','divergence_table':'divergence_table answer_changes','context_life':'context_life','intervals':'intervals','figures':'bytes_frontier heatmap quality_figure','log':'log dashboards','render':'render','terminal':'terminal','report':'report','report_browser':'report_browser'},
'diagnose':{'eviction_log':'diagnose_log','replay':'diagnose_replay diagnose_worst','twin':'diagnose_twin','compare':'diagnose_compare diagnose_kinds','show':'diagnose_show diagnose_retrieval'},
'engines':{'custom_generate':'custom_generate','trace':'trace'},
'experiments':{'exhibits':'exhibits exhibits_made','judgements':'exhibit_judgements exhibits_a2sf_pqcache','measured':'exhibits_measured papers_numbers','real_scale':'exhibits_real','league':'league','methods_league':'methods_league floors','causal':'causal causal_command','kl_scale':'divergence_scale metric_agreement','notebooks':'notebooks','retrieval_experiments':'retrieval_experiments needle_kept window_nll','testbed_export':'testbed_export','training':'training','yardstick':'yardstick'},
'benchmarks':{'benchmarks':'benchmarks benchmarks_run','gpu_first':'gpu_first predict','machine_code':'machine_code'},
'':{'docs':'docs docs_true answers names','golden':'golden','layers':'layers'},
}
T={}
have={p.stem[5:] for p in Path('tests').glob('test_*.py')}; used=set()
for pk,gs in G.items():
    for name,ms in gs.items():
        ms=[m for m in ms.split() if m in have]
        if not ms: continue
        used|=set(ms)
        n=f'{pk}/test_{name}.py' if pk else f'test_{name}.py'
        T['tests/'+n]=[f'tests/test_{m}.py' for m in ms]
left=sorted(have-used); print('left',left,len(T),file=sys.stderr)
for m in left: T[f'tests/run/test_{m}.py']=[f'tests/test_{m}.py']
stems=[t.rsplit('/',1)[1] for t in T]; print('dup',[s for s in stems if stems.count(s)>1],file=sys.stderr)
json.dump({"targets":T,"titles":{},"names":{},"rewrite":["tests/*.py","tests/faults/*.py","tests/peers/*.py","tests/golden/*.py"]},sys.stdout,indent=1)
