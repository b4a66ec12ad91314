"""Module-level import graph of targets: strongly connected components."""
import ast
import collections
import pathlib

R=pathlib.Path('kvexp'); g=collections.defaultdict(set); mods={}
for p in R.rglob('*.py'): mods['.'.join(p.with_suffix('').parts).removesuffix('.__init__')]=p
for m,p in mods.items():
    for n in ast.parse(p.read_text()).body:
        if isinstance(n,ast.ImportFrom) and n.module and n.module.startswith('kvexp'):
            for a in n.names:
                x=f'{n.module}.{a.name}'
                y=x if x in mods else n.module
                if y in mods: g[m].add((y,a.name))
def reach(a):
    s=set();st=[a]
    while st:
        x=st.pop()
        for y,_ in g[x]:
            if y not in s: s.add(y);st.append(y)
    return s
R_={m:reach(m) for m in mods}
seen=set()
for m in mods:
    if m in R_[m] and m not in seen:
        comp={x for x in R_[m] if m in R_[x]}; seen|=comp
        print('SCC',sorted(comp))
        for x in sorted(comp):
            for y in sorted(comp):
                names=[n for z,n in g[x] if z==y]
                if names: print('   ',x,'->',y,names)
