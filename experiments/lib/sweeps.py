"""Sweeps of SmolLM2-135M that are no exhibit: every task, the league of methods, and the life of a context.

Words of a command line, "FIXED | SWEPT"; with the exhibits they become conf/experiments.json (`lib.exhibits`).
"""

from __future__ import annotations

MODEL = "model=smollm2_135m"
NINE = "method=window,streaming_llm,h2o,keyformer,a2sf,tova,snapkv,pqcache,ideal kv_ratio=0.2,0.5,0.7"
SIX = "method=window,h2o,keyformer,a2sf,tova,ideal kv_ratio=0.2,0.5,0.7"  # which a budget of a few slots can hold
HAYSTACKS = "limit=16 task.lengths=[1000,2000,4000,8000] task.depths=[0,33,67,100]"
EIGHT_SETS = "qasper,multifieldqa_en,hotpotqa,2wikimqa,trec,triviaqa,samsum,passage_retrieval_en"
BUDGETS = "method=h2o,snapkv,keydiff,expected_attention kv_ratio=0.125,0.25,0.5,0.75"
ALL_OF = {  # of each task what is fixed; of choices 16 items decode together: in float32 that changes no number
    "cnn_dailymail": "limit=100 task.max_new_tokens=40",  # the runs of experiment=divergence_power
    "govreport": "limit=6 task.max_prompt_tokens=8000 task.max_new_tokens=64",
    "gsm8k": "limit=20 task.max_new_tokens=128",
    "lm_eval": "limit=20 batch_size=16 task.num_fewshot=0",
    # Of each set; five rows could not show one above its floor.
    "longbench": "limit=12 task.max_prompt_tokens=4000 task.max_new_tokens=32",
    "memory": "limit=48",  # asked after the eviction; eight to a conversation
    "needle": f"{HAYSTACKS} task.max_new_tokens=32",
    "news_qa": "limit=48",  # asked after the eviction; four to an article
    "passkey": HAYSTACKS,
    "perplexity": "limit=null task.concatenate=true task.prefill_tokens=512 task.total_tokens=1024",  # one text of all
    "soda": "limit=5 task.max_new_tokens=48",  # the published dialogues: shown, too few for a verdict
    "xsum": "limit=20 task.max_new_tokens=32",
}
OPTIONS = {"gsm8k": "gsm8k_cot", "longbench": f"longbench task.subset={EIGHT_SETS}"}  # of `task`, where named otherwise
LEAGUE = {
    "cnn_dailymail": "divergence=only task.max_new_tokens=24",
    "needle": (
        "divergence=true task.lengths=[1000,2000,4000,8000] task.depths=[10,30,50,70,90] task.max_new_tokens=20"
    ),
    "news": "divergence=only task.max_new_tokens=24",
    "news_qa": "divergence=true task.max_new_tokens=24",
}
LIFE = {
    # Question seen or hidden: four questions about each of 24 articles, in the prompt and after the eviction; kvexp
    # results OUTPUTS has a column of each. 34 runs, at most 100 minutes of a core.
    "question": (
        f"{MODEL} task=news_qa limit=96 divergence=true | task.question=in_prompt,after_eviction "
        "method=window,streaming_llm,h2o,keyformer,a2sf,tova,snapkv,expected_attention kv_ratio=0.2,0.5"
    ),
    # Four questions of each of 24 evicted caches: kvexp results OUTPUTS --view questions. About 40 minutes of a
    # core; every run is timed by itself with hydra/launcher=basic.
    "many_questions": (
        f"{MODEL} task=news_qa limit=96 questions=all batch_size=1 divergence=false | "
        "method=streaming_llm,h2o,snapkv,expected_attention kv_ratio=0.2,0.5"
    ),
    # Twenty conversations of seven turns, each in one cache: kvexp results OUTPUTS --view turns (or distance). 8
    # runs, about 140 minutes of a core; the plan says 72, since it leaves out that each answer is fed once more to
    # a full cache.
    "turns": (f"{MODEL} task=dialogue limit=140 | task.history=own,full method=streaming_llm,h2o,snapkv kv_ratio=0.3"),
    # Instructions and a secret under eviction, with both remedies. The budget has to hold system prompt, sinks and
    # recent window; 0.2 does not. 20 runs of 48, about 50 minutes.
    "instructions": (
        f"{MODEL} task=instructions limit=48 divergence=false | task=instructions,instructions_leak "
        "task.question=after_eviction method=streaming_llm,h2o,snapkv kv_ratio=0.5 keep=null,span,fair"
    ),
    # A story and a list of facts about each of 6 articles, up to 1,024 tokens, at budgets in tokens: kvexp results
    # OUTPUTS --view long. 9 runs, at most 70 minutes of a core; memory by the plan at most 5.4 GB. Of 4,096 tokens:
    # task.max_new_tokens=4096 limit=4, about 66 minutes and 5.2 GB by the plan.
    "long_answers": (
        f"{MODEL} task=long_answers budget=tokens limit=12 divergence=true | "
        "method=streaming_llm,h2o,tova,snapkv budget.tokens=256,512"
    ),
    # A needle in 2,048 tokens, read whole and in chunks, at 512 slots: kvexp results OUTPUTS --view chunks. 13 runs
    # of 20 examples, about 35 minutes of a core; the plan counts one prefill for all of them, and so says less.
    "bounded_prefill": (
        f"{MODEL} task=news_needle budget=tokens prefill=bounded batch_size=1 divergence=true "
        "task.lengths=[2048] task.question=after_eviction | "
        "method=streaming_llm,h2o,tova,keydiff budget.tokens=512 prefill.chunk=null,128,512"
    ),
    # A needle in 4,096 and in 12,000 tokens, of which the model has 8,192 positions, read in chunks with positions
    # renumbered: at 12,000 the full cache is no ceiling, look at the scores themselves. 8 runs of 5 examples, about 35
    # minutes of a core by the plan, most of them for the full cache at 12,000 tokens.
    "beyond_context": (
        f"{MODEL} task=news_needle budget=tokens prefill=bounded limit=5 batch_size=1 divergence=false "
        "cache.positions=renumbered cache.beyond_context=true | task.lengths=[4096],[12000] "
        "method=streaming_llm,h2o,tova budget.tokens=1024 prefill.chunk=512"
    ),
}

SWEEPS = {
    **{
        f"real/tasks_{name}": f"{words} | {MODEL} task={OPTIONS.get(name, name)} {SIX if name == 'lm_eval' else NINE}"
        for name, words in ALL_OF.items()
    },
    # Of the league a few methods; `python -m experiments.methods_league` takes all.
    **{f"real/league_{name}": f"limit=20 {words} | {MODEL} task={name} {BUDGETS}" for name, words in LEAGUE.items()},
    **{f"real/life_{name}": words for name, words in LIFE.items()},
}
