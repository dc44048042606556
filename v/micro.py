import time, numpy as np
from stratakv.tiers.tag import Tagger, payload_digest
N=112; S=1<<20
src=np.random.randint(0,255,(2*N,S),dtype=np.uint8); dst=np.zeros((N+56,S),np.uint8)
import threading
def best(f,n=7):
    b=9
    for _ in range(n):
        t=time.perf_counter(); f(); b=min(b,time.perf_counter()-t)
    return b*1e3
def copy():
    for i in range(N): np.copyto(dst[i],src[i])
def hsh():
    for i in range(N): payload_digest(src[i].data)
def both():
    for i in range(N):
        np.copyto(dst[i],src[i]); payload_digest(dst[i].data)
def par(k=2):
    def w(j):
        for i in range(j,N,k):
            np.copyto(dst[i],src[i]); payload_digest(dst[i].data)
    ts=[threading.Thread(target=w,args=(j,)) for j in range(k)]
    [t.start() for t in ts];[t.join() for t in ts]
print("copy",best(copy),"hash",best(hsh),"both",best(both),"par2",best(par))
def steps(sz):
    def f():
        for i in range(N):
            for a in range(0,S,sz):
                np.copyto(dst[i,a:a+sz],src[i,a:a+sz])
    return f
print("copy 256K", best(steps(1<<18)))
