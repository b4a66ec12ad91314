from pathlib import Path


def sub(p,*pairs):
    s=Path(p).read_text()
    for a,b in pairs:
        assert a in s,(p,a); s=s.replace(a,b)
    Path(p).write_text(s)
for d in sorted((p for p in Path('kvexp').rglob('*') if p.is_dir()),key=lambda p:-len(p.parts)):
    if not any(x for x in d.iterdir() if x.name!='__pycache__'):
        import shutil; shutil.rmtree(d)
sub('kvexp/tasks/articles.py',('resources.files(__name__)','resources.files("kvexp.tasks") / "articles_data"'))
sub('kvexp/results/report.py',('files("kvexp.results.report").joinpath("assets", name)','files("kvexp.results").joinpath("assets", name)'))
sub('experiments/studies/testbed.py',('MODELS = Path(__file__).resolve().parents[1] / "testbed" / "models"','MODELS = Path(__file__).resolve().parents[2] / "kvexp" / "tasks" / "testbed_models"'),('"-m", "experiments.studies.testbed"]','"-m", "experiments.studies.testbed", "train"]'))
for d in ('results','run','diagnose','engines','experiments/studies'):
    p=Path(d if '/' in d else 'kvexp/'+d)/'__init__.py'
    if not p.exists(): p.write_text({'results':'"""Recorded runs as tables, verdicts, figures and pages."""\n','run':'"""From a command line to recorded runs."""\n','diagnose':'"""Why a run lost quality."""\n','engines':'"""Engines other than kvexp\'s own."""\n','experiments/studies':'"""Studies that no sweep needs: league, causes, scale of KL, yardstick, training of the testbed."""\n'}[d])
s=Path('pyproject.toml').read_text()
s=s.replace('exclude = ["kvexp.tasks.articles.texts", "kvexp.conf", "kvexp.conf.*", "kvexp.results.report.assets", "kvexp.tasks.testbed.models*"]','exclude = ["kvexp.conf", "kvexp.conf.*", "kvexp.results.assets", "kvexp.tasks.articles_data*", "kvexp.tasks.testbed_models*"]')
a=s.index('"kvexp" = ["conf/**/*"]'); b=s.index('[tool.pytest')
s=s[:a]+'''"kvexp" = ["conf/**/*"]  # kvexp/conf is a link to conf/
"kvexp.tasks" = ["articles_data/*.json", "articles_data/texts/*.json", "testbed_models/*/*"]
"kvexp.results" = ["assets/*"]
"kvexp.engines" = ["kit/*.npz"]

'''+s[b:]
Path('pyproject.toml').write_text(s)
Path('tests/test_layers.py').write_text(Path('tools/house/layers_of_the_new_house.py').read_text())
sub('tests/run/test_install.py',('("conf", "articles/texts", "report/assets", "testbed/models")','("conf", "tasks/articles_data/texts", "results/assets", "tasks/testbed_models")'),('kvexp/tasks/articles_data/needles.json' if 'kvexp/tasks/articles_data/needles.json' in Path('tests/run/test_install.py').read_text() else 'kvexp/tasks/articles_data/needles.json','kvexp/tasks/articles_data/needles.json'))
p=Path('tests/tasks/test_articles.py'); s=p.read_text().replace('resources.files("kvexp.tasks").joinpath("articles_data")','resources.files("kvexp.tasks") / "articles_data"').replace('resources.files("kvexp.tasks").joinpath("articles_data")','resources.files("kvexp.tasks") / "articles_data"'); p.write_text(s)

sub('tests/results/test_terminal.py',('own = {"cli.py", "terminal.py", "testbed/__main__.py", "training/__main__.py", "training/launch.py"}\n    own |= {"tasks/testbed/__main__.py", "trace/trace_check.py"}','own = {"cli.py", "util.py", "tasks/testbed.py", "engines/trace_check.py"}'))
sub('tests/core/test_triton.py',('monkeypatch.setattr(triton_observe, "find_spec", lambda name: None)','monkeypatch.setattr("kvexp.core.config.find_spec", lambda name: None)'))
s=Path('tests/results/test_report.py').read_text(); a=s.index('def test_a_section_is_a_python_file_a_script_and_a_line'); b=s.find('\n\n\n',a)
s=s[:a]+'''def test_a_section_has_a_script_of_its_name() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
    for section in SECTIONS:
        assert f\'kvexp.section("{section.name}"\' in asset(f"{section.name}.js")
'''+(s[b:] if b>0 else ''); Path('tests/results/test_report.py').write_text(s)
s=Path('tests/test_docs.py').read_text()
s=s.replace('FILES = sorted((ROOT / "kvexp").rglob("*.py"))','FILES = sorted([*(ROOT / "kvexp").rglob("*.py"), *(ROOT / "experiments" / "studies").glob("*.py")])')
s=s.replace('("decode", "observe", "core", "methods", "retrieval", "models", "generate")','("core", "methods", "retrieval", "hf", "generate")')
Path('tests/test_docs.py').write_text(s)
s=Path('tests/engines/test_custom_generate.py').read_text()
s=s.replace('"core_select.py", "methods_keyformer.py", "models_cache.py"','"core_eviction.py", "methods_keyformer.py", "hf_cache.py"')
s=s.replace('        select,\n        Budget','        noise,\n        Budget').replace('core_select','core_noise').replace(' as select"',' as noise"').replace('{"kvexp.core", "kvexp.core.slots"}','{"kvexp.core", "kvexp.core.noise"}')
s=s.replace('import (\\n        select,','import (\\n        noise,')
Path('tests/engines/test_custom_generate.py').write_text(s)
