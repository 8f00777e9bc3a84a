def write(done,path,rates): pass
