// Cheap load generator, single-threaded epoll. Closed or open loop. Non-stream and SSE.
// lg -p PORT -f bodies.bin -c CONNS -n N [-r RATE] [-s] [-u path] [-H "Header: v"] [-U uniq_offset] [-T max_seconds] [-S start_index] [-k TENANTS]
// -k: requests carry, in turn, the API keys wr-key-of-tenant-0, wr-key-of-tenant-1, ...
// bodies.bin: repeated [u32 LE len][bytes].  A 16-byte marker UUUUUUUUUUUUUUUU in a body is replaced by a unique hex counter.
// each body may have the text "stream":false / "stream":true already.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <time.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>
typedef struct {int fd;int busy;char*ob;size_t ol,os,oc;int64_t t0,tf;char hb[8192];size_t hl;int inhdr;long cl;int chunked,closehdr;int status;
 int cst;long cn; // chunk state
 int bol; int dn; char line[700]; int ll; long bodyb; int gotdone; int64_t tlast;} cx;
static int64_t now(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec*1000000000LL+t.tv_nsec;}
static int port,C=16,stream;static long N=1000;static double rate;static const char*path="/v1/chat/completions";static char xh[2048];
static char**bp;static uint32_t*bl;static int32_t*bu;static long nb;static uint64_t uq;static int useu;static double T=120;static long tenants;
static cx*cs;static int ep;static long issued,done_,errs;static long stat_[600];
static float*lat,*ttf;static long nttf;static float*cd;static long ncd,capcd=4000000;static long chunks,bytes,reconn;
static int *idle;static int nidle;static long qhead;
static void conn_open(cx*c){
  c->fd=socket(AF_INET,SOCK_STREAM,0);struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port)};a.sin_addr.s_addr=htonl(INADDR_LOOPBACK);
  if(connect(c->fd,(void*)&a,sizeof a)){perror("connect");exit(1);}
  int one=1;setsockopt(c->fd,IPPROTO_TCP,TCP_NODELAY,&one,sizeof one);fcntl(c->fd,F_SETFL,O_NONBLOCK);
  struct epoll_event e={.events=EPOLLIN,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_ADD,c->fd,&e);
}
static void fl(cx*c){while(c->os<c->ol){ssize_t w=send(c->fd,c->ob+c->os,c->ol-c->os,MSG_NOSIGNAL);if(w<0){if(errno==EAGAIN){struct epoll_event e={.events=EPOLLIN|EPOLLOUT,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e);return;}return;}c->os+=w;}
}
static void start(cx*c,int64_t t0){
  long i=(issued++)%nb;c->busy=1;c->t0=t0;c->tf=0;c->hl=0;c->inhdr=1;c->cl=-1;c->chunked=0;c->closehdr=0;c->status=0;c->cst=0;c->cn=0;c->bol=1;c->dn=0;c->ll=0;c->bodyb=0;c->gotdone=0;
  char key[80]="";if(tenants)snprintf(key,sizeof key,"Authorization: Bearer wr-key-of-tenant-%ld\r\n",issued%tenants);
  char h[4096];int l=snprintf(h,sizeof h,"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: lg\r\nAccept: */*\r\nContent-Type: application/json\r\n%s%sContent-Length: %u\r\n\r\n",path,port,xh,key,bl[i]);
  if(c->oc<l+bl[i]){c->oc=(l+bl[i])*2;c->ob=realloc(c->ob,c->oc);}
  memcpy(c->ob,h,l);memcpy(c->ob+l,bp[i],bl[i]);
  if(useu&&bu[i]>=0){char u[20];snprintf(u,sizeof u,"%016llx",(unsigned long long)(uq++)*0x9E3779B97F4A7C15ULL);memcpy(c->ob+l+bu[i],u,16);}
  c->ol=l+bl[i];c->os=0;fl(c);
}
static void finish(cx*c,int ok){
  int64_t t=now();long k=done_++;
  if(k<N)lat[k]=(t-c->t0)/1e3;
  if(!ok)errs++;
  if(c->status>0&&c->status<600)stat_[c->status]++;else stat_[0]++;
  c->busy=0;
  if(!ok||c->closehdr){epoll_ctl(ep,EPOLL_CTL_DEL,c->fd,0);close(c->fd);reconn++;if(issued<N)conn_open(c);else c->fd=-1;}
  idle[nidle++]=c-cs;
}
static void line_end(cx*c,int64_t t){
  if(c->ll>=5&&!memcmp(c->line,"data:",5)){
    if(c->ll>=12&&!memcmp(c->line+5," [DONE]",7))c->gotdone=1;
    else{chunks++;
      char*f=memmem(c->line,c->ll,"\"fp_",4);
      if(f&&ncd<capcd){long long v=atoll(f+4);if(v>0)cd[ncd++]=(t-v)/1e3;}
      if(!c->tf){c->tf=t;ttf[nttf++]=(t-c->t0)/1e3;}}
  }
  c->ll=0;
}
static void payload(cx*c,const char*p,size_t n,int64_t t){
  c->bodyb+=n;bytes+=n;
  if(!stream)return;
  const char*e=p+n;
  while(p<e){const char*nl=memchr(p,'\n',e-p);size_t k=(nl?nl:e)-p;size_t room=sizeof(c->line)-1-c->ll;size_t m=k<room?k:room;memcpy(c->line+c->ll,p,m);c->ll+=m;c->line[c->ll]=0;
    if(nl){line_end(c,t);p=nl+1;}else break;}
}
// returns 1 when the response is complete
static int feed(cx*c,char*p,size_t n,int64_t t){
  if(c->inhdr){
    size_t m=sizeof(c->hb)-1-c->hl;if(m>n)m=n;memcpy(c->hb+c->hl,p,m);
    char*he=memmem(c->hb,c->hl+m,"\r\n\r\n",4);
    if(!he){c->hl+=m;return 0;}
    size_t used=he+4-c->hb-c->hl;p+=used;n-=used;c->inhdr=0;*he=0;
    c->status=atoi(c->hb+9);
    char*q=strstr(c->hb,"\r\n");
    while(q){char*l=q+2;q=strstr(l,"\r\n");if(!strncasecmp(l,"content-length:",15))c->cl=atol(l+15);else if(!strncasecmp(l,"transfer-encoding: chunked",26))c->chunked=1;else if(!strncasecmp(l,"connection: close",17))c->closehdr=1;}
  }
  if(!c->chunked){ if(c->cl<0){payload(c,p,n,t);return 0;} payload(c,p,n,t);return c->bodyb>=c->cl; }
  char*e=p+n;
  while(p<e){
    switch(c->cst){
    case 0:{char ch=*p++;if(ch=='\n'){c->cst=c->cn?1:3;if(!c->cn)c->dn=0;}else{int v=ch>='0'&&ch<='9'?ch-'0':((ch|32)>='a'&&(ch|32)<='f')?(ch|32)-'a'+10:-1;if(v>=0)c->cn=c->cn*16+v;}break;}
    case 1:{long k=e-p<c->cn?e-p:c->cn;payload(c,p,k,t);p+=k;c->cn-=k;if(!c->cn)c->cst=2;break;}
    case 2:{char ch=*p++;if(ch=='\n'){c->cst=0;c->cn=0;}break;}
    case 3:{char ch=*p++;if(ch=='\n'){return 1;}break;}
    }}
  return 0;
}
static int cmp(const void*a,const void*b){float x=*(float*)a,y=*(float*)b;return x<y?-1:x>y;}
static double pc(float*a,long n,double p){if(!n)return 0;long i=(long)(p*(n-1)+0.5);return a[i];}
static double mean(float*a,long n){double s=0;for(long i=0;i<n;i++)s+=a[i];return n?s/n:0;}
int main(int ac,char**av){
  const char*bf=0;int o;long si=0;signal(SIGPIPE,SIG_IGN);
  while((o=getopt(ac,av,"p:f:c:n:r:su:H:U:T:S:k:"))!=-1)switch(o){case'p':port=atoi(optarg);break;case'f':bf=optarg;break;case'c':C=atoi(optarg);break;case'n':N=atol(optarg);break;case'r':rate=atof(optarg);break;case's':stream=1;break;case'u':path=optarg;break;case'H':strcat(xh,optarg);strcat(xh,"\r\n");break;case'U':useu=1;uq=strtoull(optarg,0,0)+1;break;case'T':T=atof(optarg);break;case'S':si=atol(optarg);break;case'k':tenants=atol(optarg);break;}
  int fd=open(bf,O_RDONLY);struct stat st;fstat(fd,&st);char*m=mmap(0,st.st_size,PROT_READ,MAP_PRIVATE|MAP_POPULATE,fd,0);
  long cap=0;for(size_t i=0;i+4<=st.st_size;){uint32_t l;memcpy(&l,m+i,4);if(nb==cap){cap=cap?cap*2:1024;bp=realloc(bp,cap*8);bl=realloc(bl,cap*4);bu=realloc(bu,cap*4);}bp[nb]=m+i+4;bl[nb]=l;char*u=memmem(m+i+4,l,"UUUUUUUUUUUUUUUU",16);bu[nb]=u?u-(m+i+4):-1;nb++;i+=4+l;}
  lat=calloc(N+1,4);ttf=calloc(N+1,4);cd=malloc(4*capcd);ep=epoll_create1(0);cs=calloc(C,sizeof*cs);idle=calloc(C+1,4);
  for(int i=0;i<C;i++)conn_open(&cs[i]);
  for(int i=C-1;i>=0;i--)idle[nidle++]=i;
  issued=si;N+=si;done_=si; // keep indices simple
  lat=realloc(lat,4*(N+1));ttf=realloc(ttf,4*(N+1));
  long base=si;
  int64_t T0=now(),Tend=T0+(int64_t)(T*1e9);
  struct epoll_event ev[512];static char rb[262144];long nreq=N-base;(void)nreq;
  double per=rate>0?1e9/rate:0;
  while(done_<N){
    int64_t t=now();if(t>Tend)break;
    if(rate<=0){while(nidle&&issued<N){start(&cs[idle[--nidle]],now());}}
    else{while(nidle&&issued<N){int64_t due=T0+(int64_t)((issued-base)*per);if(due>t)break;start(&cs[idle[--nidle]],due);}}
    struct timespec ts={1,0};
    if(rate>0&&issued<N&&nidle){int64_t due=T0+(int64_t)((issued-base)*per)-now();if(due<0)due=0;ts.tv_sec=due/1000000000;ts.tv_nsec=due%1000000000;}
    int n=epoll_pwait2(ep,ev,512,&ts,0);
    for(int i=0;i<n;i++){cx*c=ev[i].data.ptr;
      if(c->fd<0)continue;
      if(ev[i].events&EPOLLOUT){fl(c);if(c->os>=c->ol){struct epoll_event e={.events=EPOLLIN,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e);}}
      if(ev[i].events&(EPOLLIN|EPOLLHUP|EPOLLERR)){
        for(;;){ssize_t r=recv(c->fd,rb,sizeof rb,0);
          if(r>0){int64_t t2=now();if(!c->busy){continue;}
            if(feed(c,rb,r,t2)){int ok=c->status==200&&(!stream||c->gotdone);finish(c,ok);break;}
            if(r<(ssize_t)sizeof rb)break;continue;}
          if(r<0&&errno==EAGAIN)break;
          // closed
          if(c->busy){ if(!c->inhdr&&!c->chunked&&c->cl<0){c->closehdr=1;finish(c,c->status==200);} else {c->closehdr=1;finish(c,0);} }
          else {epoll_ctl(ep,EPOLL_CTL_DEL,c->fd,0);close(c->fd);reconn++;conn_open(c);}
          break;}
      }
    }
  }
  int64_t T1=now();double el=(T1-T0)/1e9;long D=done_-base;
  float*L=lat+base;qsort(L,D,4,cmp);qsort(ttf,nttf,4,cmp);double cm=mean(cd,ncd);qsort(cd,ncd,4,cmp);
  struct rusage ru;getrusage(RUSAGE_SELF,&ru);double cpu=ru.ru_utime.tv_sec+ru.ru_stime.tv_sec+(ru.ru_utime.tv_usec+ru.ru_stime.tv_usec)/1e6;
  printf("{\"done\":%ld,\"errs\":%ld,\"secs\":%.4f,\"rps\":%.1f,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f,\"ttft50\":%.1f,\"ttft99\":%.1f,\"chunks\":%ld,\"cd_mean\":%.1f,\"cd50\":%.1f,\"cd99\":%.1f,\"bytes\":%ld,\"reconn\":%ld,\"lgcpu\":%.3f,\"status\":{",D,errs,el,D/el,mean(L,D),pc(L,D,.5),pc(L,D,.9),pc(L,D,.99),pc(L,D,.999),pc(L,D,1),pc(ttf,nttf,.5),pc(ttf,nttf,.99),chunks,cm,pc(cd,ncd,.5),pc(cd,ncd,.99),bytes,reconn,cpu);
  int f=1;for(int i=0;i<600;i++)if(stat_[i]){printf("%s\"%d\":%ld",f?"":",",i,stat_[i]);f=0;}
  printf("}}\n");return 0;
}
