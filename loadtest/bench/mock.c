// Cheap mock OpenAI backend: single-threaded epoll, several ports in one process.
// usage: mock port1 [port2 ...]
// control: GET /_ctl?chunks=64&delay_us=0&align=0&ns_us=0&usage=0&ids=0&rust=0   GET /_stats   GET /_reset
// usage=1: streams end with usage where the body asks for it. ids=N: they have token ids where the body asks for them, N
// for each token, and the mock says that it is vLLM 0.32, continues prompts of ids and keeps to max_tokens. rust=1: each
// second port says that its front end is vLLM's in Rust.
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
#include <sys/uio.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <arpa/inet.h>

#define MAXPORT 64
#define MAXPFX 4096
typedef struct conn {
  int fd, port;           // port index
  char *rb; size_t rl, rc;
  char *ob; size_t ol, os, oc; // pending out
  int streaming, left; int64_t next; int is_chat; int want_close; int dead;
  int64_t pend_ns;         // nonstream delayed response
  int usage, ids, total; char *pids; // what the body asks for; the ids of its prompt, until they are sent
  struct conn *tn;
  int intimer;
} conn;
static int ports[MAXPORT], nports; static int lfds[MAXPORT];
static int ep; static conn *listeners[MAXPORT];
static int g_chunks=64; static int64_t g_delay=0; static int g_align=0; static int64_t g_ns=0; static int g_render=1; static int g_usage=0; static long g_ids=0; static int g_rust=0;static uint64_t st_render[MAXPORT];
static uint64_t st_req[MAXPORT], st_stream[MAXPORT], st_other[MAXPORT], st_bytes[MAXPORT], st_abort[MAXPORT], st_usage[MAXPORT], st_ids[MAXPORT];
static uint32_t pfx[MAXPORT][MAXPFX]; // requests per prefix id per port
static uint64_t hit[MAXPORT], miss[MAXPORT];
static conn *th, *tt; // fifo stream queue
static int64_t now_ns(void){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec*1000000000LL+t.tv_nsec;}

static void setnb(int fd){int f=fcntl(fd,F_GETFL);fcntl(fd,F_SETFL,f|O_NONBLOCK);}
static void conn_close(conn*c){
  if(c->dead) return;
  if(c->streaming) st_abort[c->port]++;
  epoll_ctl(ep,EPOLL_CTL_DEL,c->fd,0); close(c->fd); c->dead=1; c->streaming=0;
  if(!c->intimer){free(c->rb);free(c->ob);free(c->pids);free(c);}
}
static void out(conn*c,const char*p,size_t n){
  if(c->dead) return;
  if(c->ol==c->os){
    ssize_t w=send(c->fd,p,n,MSG_NOSIGNAL);
    if(w<0){ if(errno!=EAGAIN){ c->want_close=2; return;} w=0; }
    if((size_t)w==n) return;
    p+=w;n-=w; c->ol=c->os=0;
  }
  if(c->ol+n>c->oc){c->oc=(c->ol+n)*2;c->ob=realloc(c->ob,c->oc);}
  memcpy(c->ob+c->ol,p,n);c->ol+=n;
  struct epoll_event e={.events=EPOLLIN|EPOLLOUT,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e);
}
static void flush_out(conn*c){
  while(c->os<c->ol){ssize_t w=send(c->fd,c->ob+c->os,c->ol-c->os,MSG_NOSIGNAL);
    if(w<0){if(errno==EAGAIN)return;c->want_close=2;return;}c->os+=w;}
  c->ol=c->os=0;struct epoll_event e={.events=EPOLLIN,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_MOD,c->fd,&e);
}
static void resp(conn*c,const char*ct,const char*body,int n){
  char h[8192];int l=snprintf(h,sizeof h,"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: %s\r\nx-backend: %d\r\ncontent-length: %d\r\n\r\n",ct,ports[c->port],n);
  if(l+n<(int)sizeof h){memcpy(h+l,body,n);out(c,h,l+n);}else{out(c,h,l);out(c,body,n);}
}
static const char TEXT[]="The prefix cache was hit, so the engine only had to prefill the unique tail of the prompt before it could start decoding. This sentence is filler so that the answer has a realistic size for a short completion of about one hundred and twenty eight tokens, as seen in chat traffic. The prefix cache was hit, so the engine only had to prefill the unique tail of the prompt before it could start decoding.";
static char NS_CHAT[2048];static int NS_CHAT_L;static char NS_COMP[2048];static int NS_COMP_L;
static void ns_resp(conn*c){ if(c->is_chat)resp(c,"application/json",NS_CHAT,NS_CHAT_L);else resp(c,"application/json",NS_COMP,NS_COMP_L);}
// an event of l bytes at b, in front of which 10 bytes are free, as one HTTP chunk
static void send_event(conn*c,char*b,int l){char h[10];int n=snprintf(h,sizeof h,"%03x\r\n",l);memcpy(b-n,h,n);b[l]='\r';b[l+1]='\n';out(c,b-n,n+l+2);}
#define HEAD(c) ((c)->is_chat?"data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"mock-model\",":"data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"created\":1760000000,\"model\":\"mock-model\",")
static void send_chunk(conn*c,int last){
  char b[1024];int64_t t=now_ns();int l;const char*end=last?"\"stop\"":"null",*said=c->is_chat?"\"delta\":{\"content\":\" token\"}":"\"text\":\" token\"";
  if(!c->ids){l=snprintf(b+10,sizeof b-12,"%s\"system_fingerprint\":\"fp_%019lld\",\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":%s}]}\n\n",HEAD(c),(long long)t,said,end);send_event(c,b+10,l);return;}
  // with token ids, as vLLM 0.32: those of the prompt in the first event
  static char big[1<<20];char*p=c->pids?c->pids:0;
  if(c->is_chat)l=snprintf(big+10,sizeof big-12,"%s\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":[%ld]}]%s%s}\n\n",HEAD(c),said,end,g_ids,p?",\"prompt_token_ids\":":"",p?p:"");
  else l=snprintf(big+10,sizeof big-12,"%s\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,\"prompt_token_ids\":%s,\"token_ids\":[%ld]}]}\n\n",HEAD(c),said,end,p?p:"null",g_ids);
  free(c->pids);c->pids=0;send_event(c,big+10,l);
}
static void end_stream(conn*c){
  if(c->usage){char b[1024];int l=snprintf(b+10,sizeof b-12,"%s\"choices\":[],\"usage\":{\"prompt_tokens\":300,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":null}}\n\n",HEAD(c),300+c->total,c->total);send_event(c,b+10,l);}
  static const char e[]="00e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"; out(c,e,sizeof e-1); c->streaming=0;
}
static void tq(conn*c){c->tn=0;if(tt)tt->tn=c;else th=c;tt=c;c->intimer=1;}
static int64_t deadline(int64_t t){int64_t d=t+g_delay;if(g_align&&g_delay)d=((d+g_delay-1)/g_delay)*g_delay;return d;}
static void start_stream(conn*c){
  static const char h0[]="HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n";
  char h[512];int l=snprintf(h,sizeof h,"%sx-backend: %d\r\n\r\n",h0,ports[c->port]);
  out(c,h,l); c->streaming=1;c->left=c->total;
  if(g_delay==0){ while(c->left>0&&!c->want_close){send_chunk(c,--c->left==0);} end_stream(c);}
  else {c->next=deadline(now_ns());tq(c);}
}
static char *memcasefind(char*p,char*e,const char*k){size_t n=strlen(k);for(;p+n<=e;p++)if((*p|32)==k[0]&&!strncasecmp(p,k,n))return p;return 0;}
static void stats(conn*c){
  static char b[1<<16];int l=snprintf(b,sizeof b,"{\"ports\":[");
  uint64_t H=0,M=0;
  for(int i=0;i<nports;i++){int np=0;for(int k=0;k<MAXPFX;k++)np+=pfx[i][k]>0;
    l+=snprintf(b+l,sizeof b-l,"%s{\"port\":%d,\"req\":%llu,\"stream\":%llu,\"other\":%llu,\"render\":%llu,\"abort\":%llu,\"usage\":%llu,\"ids\":%llu,\"bytes\":%llu,\"pfx\":%d,\"hit\":%llu,\"miss\":%llu}",i?",":"",ports[i],(unsigned long long)st_req[i],(unsigned long long)st_stream[i],(unsigned long long)st_other[i],(unsigned long long)st_render[i],(unsigned long long)st_abort[i],(unsigned long long)st_usage[i],(unsigned long long)st_ids[i],(unsigned long long)st_bytes[i],np,(unsigned long long)hit[i],(unsigned long long)miss[i]);H+=hit[i];M+=miss[i];}
  l+=snprintf(b+l,sizeof b-l,"],\"hit\":%llu,\"miss\":%llu}",(unsigned long long)H,(unsigned long long)M);
  resp(c,"application/json",b,l);
}
static long qarg(const char*p,const char*e,const char*k,long d){char kk[32];snprintf(kk,sizeof kk,"%s=",k);char*f=memmem(p,e-p,kk,strlen(kk));return f?atol(f+strlen(kk)):d;}
// behind the last occurrence of a key with its colon, or 0: of a repeated field, engines read the last
static char*value(char*b,size_t n,const char*k){size_t kl=strlen(k);char*f=0,*p=b;while((p=memmem(p,b+n-p,k,kl)))f=p+=kl;if(f)while(f<b+n&&*f==' ')f++;return f&&f<b+n?f:0;}
static int is_true(char*b,size_t n,const char*k){char*v=value(b,n,k);return v&&*v=='t';}
static void read_options(conn*c,char*b,size_t n){
  c->total=g_chunks;c->usage=g_usage&&is_true(b,n,"\"include_usage\":");c->ids=g_ids&&is_true(b,n,"\"return_token_ids\":");
  st_usage[c->port]+=c->usage;st_ids[c->port]+=c->ids;free(c->pids);c->pids=0;
  if(!c->ids)return;
  char*m=value(b,n,"\"max_tokens\":");if(m&&atoi(m)>0&&atoi(m)<c->total)c->total=atoi(m);
  char*p=value(b,n,c->is_chat?"\"prompt_token_ids\":":"\"prompt\":");
  if(p&&*p=='['){char*e=memchr(p,']',b+n-p);if(e&&e-p<1000000){c->pids=strndup(p,e+1-p);return;}}
  size_t k=n/4>50000?50000:n/4;char*d=c->pids=malloc(k*12+3);*d++='[';for(size_t i=0;i<k;i++)d+=sprintf(d,i?",%ld":"%ld",g_ids);strcpy(d,"]");
}
static void handle(conn*c,char*req,char*hend,char*body,size_t bl){
  // request line
  char*sp=memchr(req,' ',hend-req);if(!sp){c->want_close=1;return;}
  char*path=sp+1;char*pe=memchr(path,' ',hend-path);if(!pe){c->want_close=1;return;}
  size_t pl=pe-path; int P=c->port;
  if(req[0]=='P'&&(memmem(path,pl,"/render",7)||memmem(path,pl,"/tokenize",9))){
    st_render[P]++;
    if(!g_render){static const char nf[]="HTTP/1.1 404 Not Found\r\ncontent-length: 22\r\ncontent-type: application/json\r\n\r\n{\"detail\":\"Not Found\"}";out(c,nf,sizeof nf-1);return;}
    // pseudo tokenisation: one token per 4 bytes of body (prefix stable)
    static char*tb;static size_t tc;size_t need=bl/4*7+512;if(need>tc){tc=need*2;tb=realloc(tb,tc);}
    size_t l=0;int isr=memmem(path,pl,"/render",7)!=0;
    l+=sprintf(tb+l,isr?"{\"request_id\":\"chatcmpl-0123456789abcdef\",\"token_ids\":[":"{\"count\":%zu,\"max_model_len\":131072,\"tokens\":[",bl/4);
    for(size_t i=0;i+4<=bl;i+=4){uint32_t v;memcpy(&v,body+i,4);v=(v*2654435761u)>>16;char d[8];int n=0;do{d[n++]='0'+v%10;v/=10;}while(v);if(i)tb[l++]=',';while(n)tb[l++]=d[--n];}
    l+=sprintf(tb+l,isr?"],\"features\":null,\"sampling_params\":{\"temperature\":0.7,\"max_tokens\":128},\"model\":\"mock-model\",\"stream\":false,\"cache_salt\":null,\"priority\":0,\"kv_transfer_params\":null}":"]}");
    resp(c,"application/json",tb,l);return;
  }
  if(req[0]=='P'&&pl>=15&&(memmem(path,pl,"completions",11)||memmem(path,pl,"generate",8))){
    st_req[P]++;st_bytes[P]+=bl;
    c->is_chat=memmem(path,pl,"chat",4)!=0;
    char*s=memmem(body,bl,"SYS-",4);
    if(s&&s+8<=body+bl){int id=atoi(s+4);if(id>=0&&id<MAXPFX){if(pfx[P][id]++)hit[P]++;else miss[P]++;}}
    // look for stream flag in the first 300 or the last 300 bytes (cheap), any order
    int st=0;size_t w=bl<400?bl:400;
    char*f=memmem(body,w,"\"stream\":",9);if(!f)f=memmem(body+bl-w,w,"\"stream\":",9);
    if(!f&&bl>800)f=memmem(body,bl,"\"stream\":",9);
    if(f){f+=9;while(*f==' ')f++;st=*f=='t';}
    if(st){st_stream[P]++;read_options(c,body,bl);start_stream(c);}
    else if(g_ns){c->pend_ns=1;c->next=now_ns()+g_ns;tq(c);}
    else ns_resp(c);
    return;
  }
  st_other[P]++;
  if(pl>=5&&!strncmp(path,"/_ctl",5)){g_chunks=qarg(path,pe,"chunks",g_chunks);g_delay=qarg(path,pe,"delay_us",g_delay/1000)*1000LL;g_align=qarg(path,pe,"align",g_align);g_ns=qarg(path,pe,"ns_us",g_ns/1000)*1000LL;g_render=qarg(path,pe,"render",g_render);g_usage=qarg(path,pe,"usage",g_usage);g_ids=qarg(path,pe,"ids",g_ids);g_rust=qarg(path,pe,"rust",g_rust);
    char b[200];int l=snprintf(b,sizeof b,"{\"chunks\":%d,\"delay_us\":%lld,\"align\":%d,\"ns_us\":%lld}",g_chunks,(long long)g_delay/1000,g_align,(long long)g_ns/1000);resp(c,"application/json",b,l);return;}
  if(pl>=7&&!strncmp(path,"/_stats",7)){stats(c);return;}
  if(pl>=7&&!strncmp(path,"/_reset",7)){memset(st_req,0,sizeof st_req);memset(st_stream,0,sizeof st_stream);memset(st_other,0,sizeof st_other);memset(st_render,0,sizeof st_render);memset(st_bytes,0,sizeof st_bytes);memset(st_abort,0,sizeof st_abort);memset(pfx,0,sizeof pfx);memset(hit,0,sizeof hit);memset(miss,0,sizeof miss);resp(c,"application/json","{}",2);return;}
  if(pl>=8&&!strncmp(path,"/metrics",8)){
    // 640,000 tokens: every mock can hold the 32 conversations of 8K tokens, and as much again of other prompts
    char b[3000];int l=snprintf(b,sizeof b,
    "# HELP vllm:num_requests_running Number of requests in model execution batches.\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"mock-model\"} 3.0\n"
    "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"mock-model\"} 0.0\n"
    "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"mock-model\"} 0.12\n"
    "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc{engine=\"0\",model_name=\"mock-model\"} 0.12\n"
    "# TYPE vllm:gpu_prefix_cache_hit_rate gauge\nvllm:gpu_prefix_cache_hit_rate{engine=\"0\",model_name=\"mock-model\"} 0.5\n"
    "# TYPE vllm:prefix_cache_queries_total counter\nvllm:prefix_cache_queries_total{engine=\"0\",model_name=\"mock-model\"} 1000.0\n"
    "# TYPE vllm:prefix_cache_hits_total counter\nvllm:prefix_cache_hits_total{engine=\"0\",model_name=\"mock-model\"} 500.0\n"
    "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"40000\",engine=\"0\"} 1.0\n");
    resp(c,"text/plain; version=0.0.4",b,l);return;}
  if(pl>=10&&!strncmp(path,"/v1/models",10)){const char*b="{\"object\":\"list\",\"data\":[{\"id\":\"mock-model\",\"object\":\"model\",\"created\":1760000000,\"owned_by\":\"vllm\",\"root\":\"mock-model\",\"parent\":null,\"max_model_len\":131072}]}";resp(c,"application/json",b,strlen(b));return;}
  if(pl>=8&&memmem(path,pl,"info",4)){const char*b="{\"model_path\":\"mock-model\",\"tokenizer_path\":\"mock-model\",\"served_model_name\":\"mock-model\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.6\",\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"max_total_num_tokens\":1000000}";resp(c,"application/json",b,strlen(b));return;}
  if(pl>=8&&!strncmp(path,"/version",8)&&g_rust&&c->port%2){const char*b="{\"version\":\"0.33.0\",\"rust_frontend_version\":\"0.33.0\"}";resp(c,"application/json",b,strlen(b));return;}
  if(pl>=8&&!strncmp(path,"/version",8)){resp(c,"application/json",g_ids?"{\"version\":\"0.32.0\"}":"{\"version\":\"0.13.0\"}",20);return;}
  if(memmem(path,pl,"load",4)){const char*b="[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]";resp(c,"application/json",b,strlen(b));return;}
  if((pl>=7&&!strncmp(path,"/health",7))||(pl>=5&&!strncmp(path,"/ping",5))||pl==1){resp(c,"application/json","{}",2);return;}
  static const char nf[]="HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}";out(c,nf,sizeof nf-1);
}
// returns 1 if a full request was consumed
static int try_req(conn*c){
  if(c->streaming||c->pend_ns)return 0;
  char*he=memmem(c->rb,c->rl,"\r\n\r\n",4);if(!he)return 0;he+=2;
  size_t hl=he+2-c->rb;char*p=c->rb;
  // headers
  long cl=-1;int chunked=0,expect=0;
  char*q=memchr(p,'\n',he-p+1);
  while(q&&q+1<he){char*l=q+1;q=memchr(l,'\n',he-l);
    char ch=l[0]|32;
    if(ch=='c'&&!strncasecmp(l,"content-length:",15))cl=atol(l+15);
    else if(ch=='t'&&!strncasecmp(l,"transfer-encoding:",18))chunked=1;
    else if(ch=='e'&&!strncasecmp(l,"expect:",7))expect=1;
    else if(ch=='c'&&!strncasecmp(l,"connection: close",17))c->want_close=1;
  }
  if(expect&&c->rl==hl&&cl>0){static const char x[]="HTTP/1.1 100 Continue\r\n\r\n";out(c,x,sizeof x-1);}
  size_t tot;char*body=c->rb+hl;size_t bl=0;
  if(chunked){ // decode in place when complete
    char*s=body,*e=c->rb+c->rl;
    for(;;){char*nl=memchr(s,'\n',e-s);if(!nl)return 0;long n=strtol(s,0,16);if(nl+1+n+2>e)return 0;if(n==0){tot=nl+3-c->rb;break;}s=nl+1+n+2;}
    s=body;char*d=body;for(;;){char*nl=memchr(s,'\n',e-s);long n=strtol(s,0,16);if(n==0)break;memmove(d,nl+1,n);d+=n;s=nl+1+n+2;}bl=d-body;
  } else { bl=cl>0?cl:0; tot=hl+bl; if(c->rl<tot)return 0; }
  handle(c,c->rb,he,body,bl);
  memmove(c->rb,c->rb+tot,c->rl-tot);c->rl-=tot;
  return 1;
}
int main(int ac,char**av){
  signal(SIGPIPE,SIG_IGN);
  NS_CHAT_L=snprintf(NS_CHAT,sizeof NS_CHAT,"{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":300,\"total_tokens\":428,\"completion_tokens\":128,\"prompt_tokens_details\":null},\"system_fingerprint\":null}",TEXT);
  NS_COMP_L=snprintf(NS_COMP,sizeof NS_COMP,"{\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"created\":1760000000,\"model\":\"mock-model\",\"choices\":[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":300,\"total_tokens\":428,\"completion_tokens\":128}}",TEXT);
  ep=epoll_create1(0);
  for(int i=1;i<ac&&nports<MAXPORT;i++){int p=atoi(av[i]);int fd=socket(AF_INET,SOCK_STREAM,0);int one=1;setsockopt(fd,SOL_SOCKET,SO_REUSEADDR,&one,sizeof one);
    struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(p)};a.sin_addr.s_addr=htonl(INADDR_LOOPBACK);
    if(bind(fd,(void*)&a,sizeof a)||listen(fd,4096)){perror("bind");return 1;}setnb(fd);
    conn*c=calloc(1,sizeof*c);c->fd=fd;c->port=nports;lfds[nports]=fd;listeners[nports]=c;ports[nports++]=p;
    struct epoll_event e={.events=EPOLLIN,.data.ptr=c};epoll_ctl(ep,EPOLL_CTL_ADD,fd,&e);}
  struct epoll_event ev[512];
  for(;;){
    struct timespec ts,*tp=0;
    if(th){int64_t d=th->next-now_ns();if(d<0)d=0;ts.tv_sec=d/1000000000;ts.tv_nsec=d%1000000000;tp=&ts;}
    int n=epoll_pwait2(ep,ev,512,tp,0);
    for(int i=0;i<n;i++){conn*c=ev[i].data.ptr;
      if(c->port>=0&&c==listeners[c->port]){
        for(;;){int fd=accept4(c->fd,0,0,SOCK_NONBLOCK);if(fd<0)break;int one=1;setsockopt(fd,IPPROTO_TCP,TCP_NODELAY,&one,sizeof one);
          conn*k=calloc(1,sizeof*k);k->fd=fd;k->port=c->port;k->rc=16384;k->rb=malloc(k->rc);struct epoll_event e={.events=EPOLLIN,.data.ptr=k};epoll_ctl(ep,EPOLL_CTL_ADD,fd,&e);}
        continue;}
      if(c->dead)continue;
      if(ev[i].events&EPOLLOUT)flush_out(c);
      if(ev[i].events&(EPOLLIN|EPOLLHUP|EPOLLERR)){
        int eof=0;
        for(;;){if(c->rc-c->rl<8192){c->rc*=2;c->rb=realloc(c->rb,c->rc);}
          size_t room=c->rc-c->rl-1;
          ssize_t r=recv(c->fd,c->rb+c->rl,room,0);
          if(r>0){c->rl+=r;if((size_t)r<room)break;continue;}
          if(r==0){eof=1;break;} if(errno==EAGAIN)break; eof=1;break;}
        if(eof){conn_close(c);continue;}
        while(c->rl&&try_req(c));
      }
      if(c->want_close&&!c->streaming&&!c->pend_ns&&(c->ol==c->os||c->want_close==2)){conn_close(c);}
    }
    if(th){int64_t t=now_ns();
      while(th&&th->next<=t){conn*c=th;th=c->tn;if(!th)tt=0;c->intimer=0;
        if(c->dead){free(c->rb);free(c->ob);free(c->pids);free(c);continue;}
        if(c->pend_ns){c->pend_ns=0;ns_resp(c);while(c->rl&&try_req(c));continue;}
        int last=--c->left<=0;send_chunk(c,last);
        if(c->want_close==2){conn_close(c);continue;}
        if(last){end_stream(c);while(c->rl&&try_req(c));}
        else{c->next=g_align?deadline(t):c->next+g_delay;if(c->next<t)c->next=t; tq(c);}
      }}
  }
}
