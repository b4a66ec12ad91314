"""Every function and class of the tree before is in the tree after, with the same body but for names that moved."""
import ast
import collections
import pathlib
import sys

before,after=map(pathlib.Path,sys.argv[1:3])
def norm(n):
    class T(ast.NodeTransformer):
        def visit_Import(self,x): return None
        def visit_ImportFrom(self,x): return None
        def visit_Name(self,x): return ast.Name('n',ast.Load())
        def visit_Attribute(self,x): self.generic_visit(x); return ast.Name('n',ast.Load()) if isinstance(x.value,ast.Name) else x
        def visit_FunctionDef(self,x): self.generic_visit(x); x.name='f'; x.body=x.body or [ast.Pass()]; return x
        def visit_ClassDef(self,x): self.generic_visit(x); x.name='c'; return x
        def visit_Constant(self,x): return ast.Constant('s') if isinstance(x.value,str) else x
    import copy
    return ast.dump(T().visit(copy.deepcopy(n)))
def collect(roots):
    c=collections.Counter(); where={}
    for r in roots:
        for p in (r.rglob('*.py') if r.is_dir() else [r]):
            for n in ast.parse(p.read_text()).body:
                if isinstance(n,(ast.FunctionDef,ast.ClassDef)): d=norm(n); c[d]+=1; where.setdefault(d,[]).append(f'{p}:{n.name}')
    return c,where
a,wa=collect([before/'kvexp']); b,wb=collect([after/'kvexp',after/'experiments'/'studies',after/'tests'/'reference_check.py'])
lost=a-b; new=b-a
print(sum(a.values()),sum(b.values()))
for d in lost: print('LOST',wa[d])
for d in new: print('NEW',wb[d])
